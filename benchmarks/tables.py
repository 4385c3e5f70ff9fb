"""Write the tables of the README and of docs/benchmarks from the results that are kept there.

    python benchmarks/tables.py

A test holds the documents to what this gives. After a new measurement (`python -m cupyfused bench --output docs/benchmarks/h200`)
run it, and read what the sentences around the tables say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cupyfused.bench.report import readable
from cupyfused.bench.results import FORWARD, TRAINING, Results, Timing, load
from cupyfused.bench.sections import FRESH, WALL

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "h200" / "bench.json"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks" / "README.md", ROOT / "docs" / "when.md")
Cell = Callable[[Timing], str]


def share(one: Timing) -> str:
    """As a whole percentage of a copy's rate."""
    return f"{one.share:.0%}" if one.share is not None else ""


def duration(one: Timing) -> str:
    """With a unit that suits it."""
    return readable(one.seconds) if one.seconds is not None else ""


def table(head: str, timings: Sequence[Timing], row: Cell, column: Cell, cell: Cell) -> str:
    """Return a table in Markdown: forward before forward + backward in a cell, in the order in which they were measured."""
    rows, columns = (list(dict.fromkeys(map(name, timings))) for name in (row, column))
    lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in rows:
        cells = [[cell(one) for one in timings if row(one) == name and column(one) == of] for of in columns]
        lines.append(f"| {name} | {' | '.join(' / '.join(one) for one in cells)} |")
    return "\n".join(lines)


def peer(one: Timing) -> str:
    """The column of most tables."""
    return one.peer


def size(one: Timing) -> str:
    """The number of elements as a power of two."""
    return f"2^{one.elements.bit_length() - 1}"


def layouts(results: Results, dtype: str) -> str:
    """Shares of a copy's rate by layout."""
    return table("layout", [one for one in results.of("layouts") if one.dtype == dtype], lambda one: one.case, peer, share)


def sizes(results: Results, section: str, case: str) -> str:
    """Wall time over sizes."""
    return table("elements", [one for one in results.of(section) if one.case == case], size, peer, duration)


def everyone(results: Results) -> str:
    """All peers: time of a call and of the GPU, build and first result."""
    few = [one for one in results.of("peers") if one.case != FRESH and one.elements == 2**20]
    fresh = [one for one in results.of("peers") if one.case == FRESH and one.step in ("build", "first result")]
    names = {WALL: WALL, FORWARD: "GPU, forward / forward + backward", TRAINING: "GPU, forward / forward + backward"}
    return table("2^20 elements", [*few, *fresh], peer, lambda one: names.get(one.step, one.step), duration)


def tables(results: Results) -> Iterator[tuple[str, str]]:
    """Yield each table under the name that its place in the documents has."""
    for dtype in ("float32", "bfloat16", "float16"):
        yield f"layouts {dtype}", layouts(results, dtype)
    yield "sizes eager", sizes(results, "latency", "eager")
    yield "sizes graph", sizes(results, "latency", "CUDA graph")
    yield "sizes cpu", sizes(results, "cpu", "PyTorch")
    yield "sizes numpy", sizes(results, "cpu", "NumPy")
    yield "host", table("host's time, 1,024 elements", results.of("host"), peer, lambda one: one.step, duration)
    yield "cold", table("fresh process", results.of("cold"), lambda one: f"{one.peer}, {one.case}", lambda one: one.step, duration)
    yield "peers", everyone(results)
    large = [one for one in results.of("peers") if one.elements == 2**27]
    yield "peers large", table("2^27 elements", large, peer, lambda one: "GPU, forward / forward + backward", duration)


def written(text: str, results: Results) -> str:
    """Return a document with its tables replaced."""
    for name, lines in tables(results):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n\n{lines}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    measured = load(RESULTS)
    for document in DOCUMENTS:
        document.write_text(written(document.read_text(encoding="utf-8"), measured), encoding="utf-8")
