"""What NVRTC refuses: the error names op, dtypes, architecture and options, and its log speaks of our files. No GPU is needed."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from cupyfused import CompileError, CudaError, CupyfusedError, _host, _kernel, _source
from cupyfused._plan import Backend

torch = pytest.importorskip("torch")

try:
    VERSION = _kernel.nvrtc_version()
except CudaError as missing:
    pytest.skip(f"needs NVRTC: {missing}", allow_module_level=True)

OPS = {"fused_scale_bias": (), "fused_scale_bias_clamp": (0.5, 2.5)}
ARCHITECTURE = "sm_90"


def op_named(name: str) -> Any:
    """Return a copy of an op, to be broken; made with copy() so that it registers nowhere."""
    module = __import__(f"cupyfused.ops.{name}", fromlist=["OP"])
    op = copy.copy(module.OP)
    op.calls = {}
    return op


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a call would compile: a backend that loads nothing and launches nothing."""
    variants: list[Any] = []

    def load(variant: Any) -> Any:
        variants.append(variant)
        return lambda grid, buffer, stream: None

    monkeypatch.setattr(_host, "backend", Backend("host", load, 4))
    return variants


def call(op: Any, x_dtype: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32, gradient: bool = False) -> torch.Tensor:
    x = (torch.rand(4, 32) + 1).to(x_dtype)
    scale = (torch.rand(32) + 1).to(dtype).requires_grad_(gradient)
    return op(x, scale, 2.5, *OPS[op.name], impl="host")


def broken(text: str, line: int) -> str:
    """Put a mistake on a line, counted from 1."""
    lines = text.split("\n")
    lines[line - 1] = "unheard_of mistake;  " + lines[line - 1]
    return "\n".join(lines)


def line_inside(text: str, place: str) -> int:
    return text[: text.index(place)].count("\n") + 1


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_broken_functor(needed: list[Any], name: str, direction: str) -> None:
    op = op_named(name)
    line = line_inside(op.functor, f"{direction}(")
    op.text = broken(op.functor, line)
    y = call(op, gradient=direction == "backward")
    if direction == "backward":
        torch.autograd.backward(y, torch.rand_like(y) + 1)
    variant = next(one for one in needed if one.kernel_name == f"{name}_{direction}")
    with pytest.raises(CompileError) as raised:
        _kernel.compile_cubin(variant, ARCHITECTURE)
    words = str(raised.value)
    head, log = words.split("\n", 1)
    assert isinstance(raised.value, CupyfusedError)
    assert name in head
    assert "float32" in head
    assert ARCHITECTURE in head
    assert "NVRTC {}.{}".format(*VERSION) in head
    for option in (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17"):
        assert option in head
    assert re.search(rf"^{name}\.cuh\({line}\): error: .*unheard_of", log, re.MULTILINE), log


@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64), (torch.uint8, torch.float32)]
)
def test_the_dtypes_are_named(needed: list[Any], x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    op = op_named("fused_scale_bias")
    op.text = broken(op.functor, line_inside(op.functor, "forward("))
    call(op, x_dtype, dtype)
    with pytest.raises(CompileError) as raised:
        _kernel.compile_cubin(needed[0], ARCHITECTURE)
    head = str(raised.value).partition("\n")[0]
    for one in (x_dtype, dtype):
        assert str(one).removeprefix("torch.") in head


@pytest.mark.parametrize("file", ["common.cuh", "elementwise.cuh"])
def test_a_mistake_in_the_files_that_ops_share(needed: list[Any], monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    text = _source.cuda_text(file)
    line = next(number for number, one in enumerate(text.split("\n"), 1) if one.startswith("struct "))
    own_text = _source.cuda_text
    monkeypatch.setattr(_source, "cuda_text", lambda name: broken(text, line) if name == file else own_text(name))
    op = op_named("fused_scale_bias_clamp")
    call(op)
    with pytest.raises(CompileError, match=rf"(?m)^{re.escape(file)}\({line}\): error: "):
        _kernel.compile_cubin(needed[0], ARCHITECTURE)


def test_the_unbroken_text_compiles(needed: list[Any]) -> None:
    """Else the tests above might see the mistakes of something else."""
    call(op_named("fused_scale_bias"))
    assert _kernel.compile_cubin(needed[0], ARCHITECTURE).startswith(b"\x7fELF")


@pytest.mark.parametrize("architecture", ["sm_1", "sm_1234", "not an architecture"])
def test_an_architecture_that_nvrtc_does_not_know(needed: list[Any], architecture: str) -> None:
    call(op_named("fused_scale_bias"))
    with pytest.raises(CompileError) as raised:
        _kernel.compile_cubin(needed[0], architecture)
    head, log = str(raised.value).split("\n", 1)
    assert "fused_scale_bias" in head
    assert architecture in head
    assert "gpu-architecture" in log


@pytest.mark.parametrize("capability", [35, 52, 310])
def test_a_gpu_that_nvrtc_compiles_nothing_for(capability: int) -> None:
    supported = _kernel.import_cupy().cuda.nvrtc.getSupportedArchs()
    if any(one // 10 == capability // 10 for one in supported):
        pytest.skip("this NVRTC compiles for it")
    with pytest.raises(CompileError) as raised:
        _kernel.architecture(capability)
    words = str(raised.value)
    for told in (f"{capability // 10}.{capability % 10}", "NVRTC {}.{}".format(*VERSION), "pip install 'cupyfused[cuda"):
        assert told in words


def test_every_architecture_that_nvrtc_knows_is_taken() -> None:
    supported = _kernel.import_cupy().cuda.nvrtc.getSupportedArchs()
    for one in supported:
        assert _kernel.architecture(one) == f"sm_{one}"
    newest = max(one for one in supported if one // 10 == 9)
    assert _kernel.architecture(99) == f"sm_{newest}", "a later minor runs the code of an earlier one"


class _NoNvrtc:
    """CuPy's binding where the library is not there."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")


def test_without_nvrtc_the_error_says_what_to_install(needed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call(op_named("fused_scale_bias"))
    monkeypatch.setattr(_kernel.import_cupy().cuda, "nvrtc", _NoNvrtc())
    _kernel.nvrtc_version.cache_clear()
    try:
        for attempt in (
            lambda: _kernel.nvrtc_version(),
            lambda: _kernel.architecture(90),
            lambda: _kernel.cubin(needed[0], ARCHITECTURE),
        ):
            with pytest.raises(CudaError, match=r"NVRTC.*libnvrtc\.so\.13.*pip install 'cupyfused\[cuda"):
                attempt()
    finally:
        _kernel.nvrtc_version.cache_clear()
