"""The benchmark: who may be timed, what is named as absent, the JSON, the pictures and the command. No test asserts a time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cupyfused import __main__, __version__, _config
from cupyfused._config import Driver
from cupyfused.errors import CudaError

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
image = pytest.importorskip("PIL.Image")

from cupyfused.bench import (  # noqa: E402
    cases,
    peers,
    results,
    run,
    sections,
    timing,
    values,
)
from cupyfused.bench.results import FORWARD, TRAINING, Absent, Timing  # noqa: E402


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = _config.gather()._replace(driver=Driver(problem="there is no NVIDIA driver"))
    monkeypatch.setattr(_config, "gather", lambda: facts)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sections, "ELEMENTS", 1000)
    return sections.Plan("there is no NVIDIA driver", True, 2**20, tmp_path, lambda text: None)


# ---- who may be timed ---------------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[..., Any]] = {
    "no clamp": lambda x, scale, bias: x * scale + bias,
    "bounds": lambda x, scale, bias: (x * scale + bias).clamp(0, 1.01),
    "sign": lambda x, scale, bias: (x * scale - bias).clamp(0, 1),
    "one element": lambda x, scale, bias: values.composed(x, scale, bias).index_fill(0, torch.tensor(7), 0.123456),
    "NaN": lambda x, scale, bias: values.composed(x, scale, bias) * torch.nan,
    "shape": lambda x, scale, bias: values.composed(x, scale, bias)[:-1],
    "gradient of x": lambda x, scale, bias: values.composed(x.detach() + 0 * x, scale, bias),
    "gradient of bias": lambda x, scale, bias: values.composed(x, scale, bias.detach() + 0.99 * (bias - bias.detach())),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_peer_is_told_and_not_timed(name: str, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*operands: Any) -> Any:
        calls.append(name)
        return WRONG[name](*operands)

    wrong = peers.Peer("a wrong one", lambda scratch: counted)
    monkeypatch.setattr(peers, "ON_CPU", (wrong, peers.Peer("a right one", lambda scratch: values.composed)))
    found = list(sections.peers(plan))
    timed = {one.peer for one in found if isinstance(one, Timing) and one.seconds is not None}
    (problem,) = (one for one in found if isinstance(one, Timing) and one.problem)
    assert timed == {"a right one"}
    assert problem.peer == "a wrong one"
    assert problem.seconds is None
    assert "gradient" in problem.problem if "gradient" in name else "the result" in problem.problem
    assert len(calls) <= 2  # to learn the shape of the result, and to compare


def test_absent_peers_are_named(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = [one for one in sections.peers(plan) if isinstance(one, Absent)]
    assert [one.what for one in found] == ["peers on a GPU", "C++ loop, one thread"]
    assert "C++ compiler" in found[1].why
    assert "no NVIDIA driver" in found[0].why


# ---- what needs a GPU, with its clocks stopped -------------------------------------------------------------------------


@pytest.fixture
def stopped(plan: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let everything but the clocks of a GPU run, on the CPU: a plan that believes in one."""

    def still(calls: Any, *arguments: Any, **options: Any) -> Any:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1e-6)

    made = cases.operands
    monkeypatch.setattr(sections, "operands", lambda layout, elements, dtype, device: made(layout, elements, dtype, "cpu"))
    monkeypatch.setattr(sections, "gpu_seconds", still)
    monkeypatch.setattr(sections, "wall_seconds", still)
    monkeypatch.setattr(sections, "captured", lambda call: call)
    monkeypatch.setattr(sections, "copies", lambda moved: {"copy_": lambda: None, "neg": lambda: None})
    monkeypatch.setattr(peers, "COMPILED", peers.Peer("torch.compile", lambda scratch: values.composed))
    monkeypatch.setattr(peers, "ON_GPU", (peers.COMPOSED, peers.CUPYFUSED))
    monkeypatch.setattr("cupyfused.bench.peers._kernel.import_cupy", _no_cupy)
    return plan._replace(no_gpu="", elements=2**10)


def _no_cupy() -> Any:
    raise CudaError("there is no CuPy here")


def test_layouts_are_timed_for_each_peer_and_step(stopped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "LAYOUTS", cases.LAYOUTS[:2])
    found = [one for one in sections.layouts(stopped._replace(quick=False)) if isinstance(one, Timing)]
    assert not [one for one in found if one.problem]
    assert len(found) == 3 * 2 * 3 * 2  # dtypes, layouts, peers, steps
    assert {one.share for one in found} == {1.0}
    assert {one.dtype for one in found} == {"float32", "bfloat16", "float16"}


def test_latency_sets_eager_beside_eager_and_graph_beside_graph(stopped: Any) -> None:
    found = list(sections.latency(stopped))
    assert {(one.case, one.seconds) for one in found} == {("eager", 1e-6), ("CUDA graph", 1e-6 / timing.ITERATIONS_OF_A_GRAPH)}
    assert len(found) == 2 * 3 * 2 * 2  # sizes, peers, steps, modes


def test_the_host_is_timed_with_what_is_there(stopped: Any) -> None:
    found = list(sections.host(stopped))
    absent = [one for one in found if isinstance(one, Absent)]
    assert [one.what for one in absent] == [peers.CUPY.name, peers.OURS_ON_CUPY.name]
    assert {one.why for one in absent} == {"there is no CuPy here"}
    names = {one.peer for one in found if isinstance(one, Timing)}
    assert {"torch.add", "a Function that computes nothing", "composed torch", "torch.compile", "cupyfused"} == names


def test_peers_are_timed_on_the_gpu_and_by_the_wall(stopped: Any) -> None:
    found = list(sections.peers(stopped))
    steps = {(one.peer, one.step) for one in found if isinstance(one, Timing)}
    assert {step for peer, step in steps if peer == "cupyfused"} == {FORWARD, TRAINING, sections.WALL}
    assert {step for peer, step in steps if peer == "Python loop"} == {sections.WALL}
    assert "C++/CUDA extension" in {one.what for one in found if isinstance(one, Absent)}  # --quick leaves it out


# ---- time ---------------------------------------------------------------------------------------------------------------


def test_runs_alternate_and_begin_with_each_call_in_turn() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = timing.wall_seconds(calls, "cpu", rounds=4, least=0)
    assert set(found) == {"a", "b"}
    assert order[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]


# ---- the command --------------------------------------------------------------------------------------------------------


def test_the_command_measures_the_cpu_without_a_gpu(
    no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sections, "ELEMENTS", 1000)
    monkeypatch.setattr(sections, "CPU_SIZES_QUICK", (4, 6))
    output = tmp_path / "a" / "folder"
    assert __main__.main(["bench", "--quick", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    for name in run.NEED_GPU:
        assert f"Absent: {name}: there is no NVIDIA driver" in printed
    for peer in ("Python loop", "NumPy", "composed torch, CPU", "cupyfused, CPU tensors"):
        assert peer in printed
    assert {path.name for path in output.iterdir()} == {"bench.json", "sizes-cpu.png", "peers.png"}
    saved = results.load(output / "bench.json")
    assert saved.command == "python -m cupyfused bench --quick"
    assert saved.versions["cupyfused"] == __version__
    assert saved.versions["PyTorch"] == torch.__version__
    assert {one.section for one in saved.timings} == {"cold", "peers", "cpu"}
    assert str(tmp_path) not in (output / "bench.json").read_text(encoding="utf-8")


def test_a_section_that_fails_keeps_what_was_measured(
    no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(plan: Any) -> Any:
        yield Timing("cpu", "NumPy", "NumPy", FORWARD, 1e-5, elements=1024)
        raise RuntimeError("the power went")

    monkeypatch.setitem(sections.SECTIONS, "cpu", failing)
    assert __main__.main(["bench", "--only", "cpu", "--output", str(tmp_path)]) == 1
    assert "the power went" in capsys.readouterr().out
    assert len(results.load(tmp_path / "bench.json").of("cpu")) == 1


@pytest.mark.parametrize("name", ["matplotlib", "rich"])
def test_a_missing_package_names_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [one for one in sys.modules if one.startswith("cupyfused.bench") or one.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert __main__.main(["bench"]) == 1
    assert "pip install 'cupyfused[demo,torch]'" in capsys.readouterr().err


def test_a_section_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["bench", "--only", "cpu,speed", "--output", str(tmp_path)]) == 1
    assert "speed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_readme_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert "`python -m cupyfused bench`" in readme
    assert "`--quick`" in readme
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["bench", "--help"])
    printed = capsys.readouterr().out
    assert "--quick" in printed
    assert all(name in printed for name in sections.SECTIONS)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the peers' own
def test_the_quick_benchmark_runs_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = __main__.main(["bench", "--quick", "--elements", str(2**22), "--output", str(tmp_path)])
    saved = results.load(tmp_path / "bench.json")
    assert not saved.untimed
    assert status == 0
    assert {one.section for one in saved.timings} == set(sections.SECTIONS)
