"""The peers of the benchmark and their values: right ones pass in every layout, and each peer computes what it should."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from cupyfused import _kernel

torch = pytest.importorskip("torch")

from cupyfused.bench import cases, first_result, peers, ready, tutorial, values  # noqa: E402
from cupyfused.bench.results import Timing  # noqa: E402

needs_compiler = pytest.mark.skipif(bool(tutorial.no_loop()), reason="the loop is built by a C++ compiler")


def _describe(**fields: Any) -> Timing:
    return Timing("peers", "a case", **fields)


def test_a_peer_that_raises_is_told(tmp_path: Path) -> None:
    def broken(x: Any, scale: Any, bias: Any) -> Any:
        raise RuntimeError("out of luck\nand more")

    tensors = cases.operands(cases.FLAT, 64, torch.float32, "cpu")
    right, problems = ready.make_ready([peers.Peer("broken", lambda scratch: broken)], tensors, tmp_path, _describe)
    assert not right
    assert [one.problem for one in problems] == ["RuntimeError: out of luck"]


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
