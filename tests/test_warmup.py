"""Filling the cache ahead, without a GPU: what is compiled, for which GPUs, and that calls find it. Needs NVRTC, no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyfused
from cupyfused import _kernel
from cupyfused.__main__ import main
from cupyfused._dtypes import BY_NAME
from cupyfused._layout import Strided
from cupyfused._map_plan import map_plan
from cupyfused._op import OPS
from cupyfused._plan import Backend, Described
from cupyfused._source import Variant
from cupyfused._variants import table
from cupyfused.ops import fused_scale_bias

pytestmark = pytest.mark.usefixtures("nvrtc")

SMALL = ("fused_scale_bias", "int32")  # few kernels, quickly compiled


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYFUSED_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


Compiled = list[tuple[Variant, str]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """What NVRTC would have been asked for; each kernel's code is a word."""
    asked: Compiled = []

    def compile_cubin(variant: Variant, arch: str) -> bytes:
        asked.append((variant, arch))
        return b"code"

    monkeypatch.setattr(_kernel, "compile_cubin", compile_cubin)
    return asked


# ---- what is compiled ---------------------------------------------------------------------------------------------------


def test_the_command_fills_the_cache_that_calls_read(folder: Path, compiled: Compiled) -> None:
    """In a process of its own, so what is counted here is what it left out."""
    options = ["--arch", "sm_90", "--op", SMALL[0], "--dtype", SMALL[1]]
    done = subprocess.run([sys.executable, "-m", "cupyfused", "warmup", *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert str(folder) in "".join(done.stdout.split()) and "12 kernels compiled" in done.stdout

    assert cupyfused.warmup(SMALL[0], dtypes=SMALL[1], arch="sm_90") == (0, 12)
    asked: list[Variant] = []
    backend = Backend("recorder", lambda variant: asked.append(variant) or (lambda *launch: None), 132)
    int32 = Described(BY_NAME["int32"], Strided((3, 8), (8, 1)))
    map_plan(fused_scale_bias.OP, (3, 8), [int32] * 4, backend)
    assert _kernel.cubin(asked[0], _kernel.architecture(90)).startswith(b"\x7fELF")
    assert not compiled


def test_each_kernel_once_for_each_architecture(folder: Path, compiled: Compiled) -> None:
    warmed = cupyfused.warmup(cupyfused.fused_scale_bias, dtypes=[np.dtype("float32"), np.uint8], arch=["sm_80", "sm_90", "sm_80"])
    expected = table([fused_scale_bias.OP], [BY_NAME["float32"], BY_NAME["uint8"]], lambda op: (), large=False)
    assert {arch for _, arch in compiled} == {"sm_80", "sm_90"}
    for arch in ("sm_80", "sm_90"):
        assert {variant for variant, own in compiled if own == arch} == set(expected)
    assert warmed == (len(compiled), 0) and len(compiled) == 2 * len(expected) == len(list(folder.iterdir()))
    assert cupyfused.warmup("fused_scale_bias", dtypes="uint8", arch="sm_90").compiled == 0
    more = cupyfused.warmup("fused_scale_bias", dtypes=["float32", "uint8"], arch="sm_90", large=True)
    assert more.found == len(expected) and all(variant.large for variant, _ in compiled[2 * len(expected) :])


def test_every_op_by_default(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyfused._warmup.OPS", [op for op in OPS if op.name in cupyfused.__all__])  # other tests make ops
    cupyfused.warmup(arch="sm_90")
    assert {variant.op.name for variant, _ in compiled if variant.op} == {name for name in cupyfused.__all__ if "fused_" in name}
    assert {variant.x for variant, _ in compiled if variant.width > 1} == {"float32", "float16", "bfloat16", "uint8"}


def test_a_damaged_entry_is_compiled_again(folder: Path, compiled: Compiled) -> None:
    cupyfused.warmup(SMALL[0], dtypes=SMALL[1], arch="sm_90")
    next(folder.iterdir()).write_bytes(b"damaged")
    assert cupyfused.warmup(SMALL[0], dtypes=SMALL[1], arch="sm_90") == (1, 11)


# ---- GPUs ---------------------------------------------------------------------------------------------------------------


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: str) -> None:
    """Let CuPy know of these GPUs, or of no driver."""

    def count() -> int:
        if not capabilities:
            raise RuntimeError("cudaErrorInsufficientDriver")
        return len(capabilities)

    runtime = SimpleNamespace(CUDARuntimeError=RuntimeError, getDeviceCount=count)
    device = lambda index: SimpleNamespace(compute_capability=capabilities[index])  # noqa: E731
    cuda = SimpleNamespace(nvrtc=_kernel.import_cupy().cuda.nvrtc, runtime=runtime, Device=device)
    monkeypatch.setattr(_kernel, "import_cupy", lambda: SimpleNamespace(cuda=cuda))


def test_the_default_is_the_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch, compiled: Compiled) -> None:
    gpus(monkeypatch, "90", "80", "90")
    cupyfused.warmup(SMALL[0], dtypes=SMALL[1])
    assert {arch for _, arch in compiled} == {"sm_90", "sm_80"}


def test_without_a_gpu_an_architecture_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)
    with pytest.raises(cupyfused.OperandError, match=r"arch: expected an architecture.*cudaErrorInsufficientDriver.*sm_90"):
        cupyfused.warmup()


# ---- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ops": "fused_nothing"}, "ops: expected of fused_scale_bias, .*got 'fused_nothing'"),
        ({"ops": [cupyfused.fused_scale_bias, print]}, "ops: .*got 'print'"),
        ({"dtypes": "complex64"}, "dtypes: expected of bool, .*got 'complex64'"),
        ({"arch": "90"}, "arch: expected names such as 'sm_90', got '90'"),
        ({"arch": ["sm_90", 80]}, "arch: .*got 80"),
        ({"dtypes": []}, "dtypes: expected one at least"),
    ],
)
def test_arguments_that_do_not_exist(wrong: dict[str, Any], told: str, compiled: Compiled) -> None:
    with pytest.raises(cupyfused.OperandError, match=f"^warmup: {told}"):
        cupyfused.warmup(**{"arch": "sm_90", **wrong})
    assert not compiled


def test_an_architecture_that_nvrtc_does_not_know(compiled: Compiled) -> None:
    with pytest.raises(cupyfused.CompileError, match=r"compiles nothing for .* capability 3\.5"):
        cupyfused.warmup(arch="sm_35")


def test_a_folder_that_cannot_be_written(folder: Path, compiled: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write_text("in the way")
    with pytest.raises(cupyfused.CupyfusedError, match="CUPYFUSED_CACHE_DIR"):
        cupyfused.warmup(SMALL[0], arch="sm_90")
    assert main(["warmup", "--arch", "sm_90", "--op", SMALL[0]]) == 1
    assert "CUPYFUSED_CACHE_DIR" in capsys.readouterr().err


def test_without_nvrtc_the_command_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13:\nno such file\n")

    monkeypatch.setattr(_kernel, "_nvrtc", missing)
    monkeypatch.setattr(_kernel, "nvrtc_version", _kernel.nvrtc_version.__wrapped__)
    assert main(["warmup", "--arch", "sm_90"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no such file" in error and "pip install 'cupyfused[cuda13]'" in error


# ---- progress -----------------------------------------------------------------------------------------------------------


def test_progress_without_rich(compiled: Compiled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["warmup", "--arch", "sm_90", "--op", SMALL[0], "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(table([fused_scale_bias.OP], [BY_NAME["float32"]], lambda op: (), large=False))
    step = -(-count // 10)
    assert f"{step} of {count} kernels compiled" in lines and f"{count} of {count} kernels compiled" in lines
    assert len(lines) <= 13 and lines[-1].startswith(f"{count} kernels compiled in ")


def test_progress_with_rich(compiled: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    cupyfused.warmup(SMALL[0], dtypes=SMALL[1], arch="sm_90", progress=True)
    assert "12/12" in capsys.readouterr().out
    cupyfused.warmup(SMALL[0], dtypes=SMALL[1], arch="sm_90", progress=True)
    assert not capsys.readouterr().out, "no bar for nothing to do"
