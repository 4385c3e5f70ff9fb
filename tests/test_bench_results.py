"""What a run of the benchmark leaves: the JSON, the tables and the pictures."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cupyfused.errors import OperandError

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
rich_console = pytest.importorskip("rich.console")
image = pytest.importorskip("PIL.Image")

from cupyfused.bench import cases, peers, pictures, report, results, sections  # noqa: E402
from cupyfused.bench.results import FORWARD, TRAINING, Absent, Timing  # noqa: E402


def made_results() -> Any:
    """Return a whole run of plausible numbers, as a GPU would give them."""
    timings = []
    three = {"composed torch": 3.1, "torch.compile": 1.2, "cupyfused": 1.04}
    for dtype, layout, (peer, times), step in itertools.product(
        ("float32", "bfloat16"), cases.LAYOUTS, three.items(), (FORWARD, TRAINING)
    ):
        moved = 2**30 * (1 if step == FORWARD else 3)
        floor = moved / 4.2e12
        timings.append(Timing("layouts", layout.name, peer, step, floor * times, "", dtype, 2**27, moved, floor))
    for exponent, case, (peer, times), step in itertools.product(
        range(10, 23, 2), ("eager", "CUDA graph"), three.items(), (FORWARD, TRAINING)
    ):
        least = {"composed torch": 25e-6, "torch.compile": 12e-6, "cupyfused": 13e-6}[peer]
        timings.append(Timing("latency", case, peer, step, least + times * 2**exponent * 3e-12, elements=2**exponent))
    for k, peer in enumerate(peers.ON_GPU):
        for step, elements in itertools.product((FORWARD, TRAINING), (2**20, 2**27)):
            floor = elements * 12 / 4.2e12
            case = f"{elements:,} elements"
            timings.append(Timing("peers", case, peer.name, step, floor * (1.1 + k / 4), "", "float32", elements, 1, floor))
    for k, peer in enumerate((*peers.ON_GPU, *peers.ON_CPU)):
        timings.append(Timing("peers", "1,048,576 elements", peer.name, sections.WALL, 2e-5 * 1.7**k, elements=2**20))
        timings.append(Timing("peers", sections.FRESH, peer.name, "first result", 0.3 * k, elements=2**20))
    timings.append(Timing("cpu", "NumPy", "NumPy", FORWARD, 1e-5, elements=1024))
    timings.append(Timing("host", "1,024 elements", "torch.add", "no gradient", 7e-6, elements=1024))
    timings.append(Timing("cold", "import", "NumPy", "import", 0.1))
    timings.append(Timing("peers", "1,048,576 elements", "a wrong one", FORWARD, problem="the result is off by 0.5"))
    machine, versions = {"GPU": "NVIDIA H200, 140 GiB", "processor": "a processor"}, {"PyTorch": "2.11.0"}
    absent = [Absent("Triton by hand", "Triton is not installed")]
    return results.Results("python -m cupyfused bench", "2026-01-01T00:00:00+00:00", machine, versions, timings, absent)


def test_json_keeps_everything(tmp_path: Path) -> None:
    made = made_results()
    results.save(made, tmp_path / "bench.json")
    assert results.load(tmp_path / "bench.json") == made
    fields = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert set(fields) == {"schema", *(field.name for field in dataclasses.fields(results.Results))}
    fields["schema"] = 0
    (tmp_path / "old.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(OperandError, match="schema 1"):
        results.load(tmp_path / "old.json")


def test_pictures_are_drawn_of_all_that_was_measured(tmp_path: Path) -> None:
    drawn = pictures.draw(made_results(), tmp_path)
    assert {path.name for path in drawn} == {
        *("roofline-float32.png", "roofline-bfloat16.png", "sizes.png", "sizes-cpu.png", "peers.png")
    }
    for path in drawn:
        with image.open(path) as opened:
            assert opened.format == "PNG"
            assert min(opened.size) > 300


def test_without_results_there_are_no_pictures(tmp_path: Path) -> None:
    empty = dataclasses.replace(made_results(), timings=[])
    assert pictures.draw(empty, tmp_path) == []


@pytest.mark.parametrize(
    ("ours", "other", "first"),
    [
        ([1, 1, 1], [2, 2, 2], 1),
        ([3, 1.5, 1], [2, 2, 2], 2),
        ([3, 1.99, 1], [2, 2, 2], 4),
        ([3, 3, 3], [2, 2, 2], None),
        ([1, 3, 1], [2, 2, 2], 4),
    ],
)
def test_the_crossover_is_where_ours_stays_ahead(ours: list[float], other: list[float], first: int | None) -> None:
    sizes = (1, 2, 4)
    assert pictures.crossover(dict(zip(sizes, ours)), dict(zip(sizes, other))) == first
    assert ("from" in pictures.compared(dict(zip(sizes, ours)), dict(zip(sizes, other)))) == (first in sizes[1:])


def test_tables_name_the_absent_and_the_wrong() -> None:
    console = rich_console.Console(record=True, width=120, file=io.StringIO())
    report.print_results(made_results(), console)
    printed = console.export_text()
    for expected in ("Triton by hand: Triton is not installed", "off by 0.5", "96% / 96%", "AdaLN", "CUDA graph", "first result"):
        assert expected in printed


def test_documents_hold_what_was_measured() -> None:
    """The tables of the README and of the documents are those of the results that are kept."""
    root = Path(__file__).parents[1]
    specification = importlib.util.spec_from_file_location("tables", root / "benchmarks" / "tables.py")
    assert specification is not None and specification.loader is not None
    tables = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tables)
    measured = tables.load(tables.RESULTS)
    assert not measured.untimed
    for document in tables.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert "<!-- end of " in text
        assert tables.written(text, measured) == text, f"python benchmarks/tables.py has not been run since {document.name} changed"
