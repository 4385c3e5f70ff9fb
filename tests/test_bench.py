"""The benchmark: who may be timed, what is named as absent, the JSON, the pictures and the command. No test asserts a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cupyfused import __main__, __version__, _config, _kernel
from cupyfused._config import Driver

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
image = pytest.importorskip("PIL.Image")

from cupyfused.bench import (  # noqa: E402
    cases,
    first_result,
    peers,
    ready,
    results,
    run,
    sections,
    timing,
    tutorial,
    values,
)
from cupyfused.bench.results import FORWARD, Absent, Timing  # noqa: E402

needs_compiler = pytest.mark.skipif(bool(tutorial.no_loop()), reason="the loop is built by a C++ compiler")


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


def test_a_peer_that_raises_is_told(plan: Any) -> None:
    def broken(x: Any, scale: Any, bias: Any) -> Any:
        raise RuntimeError("out of luck\nand more")

    tensors = cases.operands(cases.FLAT, 64, torch.float32, "cpu")
    right, problems = ready.make_ready([peers.Peer("broken", lambda scratch: broken)], tensors, plan.scratch, _describe)
    assert not right
    assert [one.problem for one in problems] == ["RuntimeError: out of luck"]


def _describe(**fields: Any) -> Timing:
    return Timing("peers", "a case", **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", cases.LAYOUTS, ids=lambda layout: layout.name)
def test_right_values_pass_in_every_layout_and_dtype(layout: Any, dtype: Any) -> None:
    tensors = cases.operands(layout, 2**14, dtype, "cpu")
    assert values.difference(values.composed, tensors, gradients=True) == ""
    assert values.difference(peers.fused, tensors, gradients=True) == ""


def test_layouts_lie_in_memory_as_they_say() -> None:
    made = {layout.memory: cases.operands(layout, 2**20, torch.float32, "cpu")[0] for layout in cases.LAYOUTS}
    assert made["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert made["transposed"].stride()[0] == 1
    assert made["crop"].stride(0) > made["crop"].shape[1]
    assert made["unaligned"].data_ptr() % 16 == 4
    x, scale, bias = cases.operands(cases.Layout("", (-1, 4), (-1, 1), (4,)), 64, torch.float32, "cpu")
    assert (x.shape, scale.shape, bias.shape) == ((16, 4), (16, 1), (4,))
    assert cases.bytes_moved([x, scale, bias], x, gradients=False) == 4 * (64 + 16 + 4 + 64)
    assert cases.bytes_moved([x, scale, bias], x, gradients=True) == 4 * (3 * (64 + 16 + 4) + 2 * 64)


# ---- the peers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", [pytest.param(peer, id=peer.name) for peer in peers.ON_CPU])
def test_peers_on_the_cpu_are_right(peer: Any, tmp_path: Path) -> None:
    if peer.absent():
        pytest.skip(peer.absent())
    tensors = cases.operands(cases.FLAT, 1000, torch.float32, "cpu")
    right, problems = ready.make_ready([peer], tensors, tmp_path, _describe)
    assert not problems
    assert right[0].name == peer.name


def test_the_triton_kernels_are_right_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    program = """
        import torch
        from cupyfused.bench import cases, triton_kernels, values

        triton_kernels.PROGRAMS_OF_A_MULTIPROCESSOR = 2
        for elements in (1, 1023, 1024, 5001):
            tensors = cases.operands(cases.FLAT, elements, torch.float32, "cpu")
            assert values.difference(triton_kernels.ScaleBiasClamp.apply, tensors, gradients=True) == ""
    """
    _run(program, TRITON_INTERPRET="1")


def _run(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=os.environ | environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernels_of_tutorials_compile() -> None:
    pytest.importorskip("cupy", exc_type=ImportError)
    nvrtc = _kernel._nvrtc()
    program = nvrtc.createProgram(tutorial._text("tutorial.cu"), "tutorial.cu", (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=sm_90", "--std=c++17"))
    code = nvrtc.getCUBIN(program)
    assert b"tutorial_forward" in code
    assert b"tutorial_backward" in code


def test_absent_peers_are_named(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = [one for one in sections.peers(plan) if isinstance(one, Absent)]
    assert [one.what for one in found] == ["peers on a GPU", "C++ loop, one thread"]
    assert "C++ compiler" in found[1].why
    assert "no NVIDIA driver" in found[0].why


def test_an_extension_without_nvcc_or_ninja_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "nvcc" in tutorial.no_extension()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    assert "pip install ninja" in tutorial.no_extension()


@needs_compiler
def test_first_results_come_from_a_fresh_process(tmp_path: Path) -> None:
    seconds = first_result.measure("C++ loop, one thread", tmp_path, tmp_path / "caches")
    assert set(seconds) == {"build", "first result"}
    assert 0 < seconds["build"] <= seconds["first result"]


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
def test_the_quick_benchmark_runs_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["bench", "--quick", "--elements", str(2**22), "--output", str(tmp_path)]) == 0
    saved = results.load(tmp_path / "bench.json")
    assert {one.section for one in saved.timings} == set(sections.SECTIONS)
