"""Who takes part: each way to compute `clamp(x * scale + bias, *BOUNDS)`, x and bias of one shape, scale 0-dim, float32."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from .. import _kernel, fused_scale_bias_clamp
from ..errors import CudaError
from . import tutorial
from .cases import BOUNDS
from .values import composed

__all__ = [
    "COMPILED",
    "COMPOSED",
    "CUPY",
    "CUPYFUSED",
    "ON_CPU",
    "ON_GPU",
    "OURS_ON_CUPY",
    "Peer",
    "by_name",
    "converted",
    "fused",
    "numpy_expression",
    "to_tensor",
]

Call = Callable[[Any, Any, Any], Any]


def _nothing() -> str:
    return ""


class Peer(NamedTuple):
    """One way to compute the expression.

    `build` imports and compiles what can be before a first call, in a scratch folder, and returns the call. `absent` says why
    this machine cannot run it, "" where it can. `arrays` is what it is called with: torch, cupy, numpy or list.
    """

    name: str
    build: Callable[[Path], Call]
    absent: Callable[[], str] = _nothing
    arrays: str = "torch"
    has_gradients: bool = True


def fused(x: Any, scale: Any, bias: Any) -> Any:
    """Compute the expression by this package."""
    return fused_scale_bias_clamp(x, scale, bias, *BOUNDS)


# ---- what each needs ----------------------------------------------------------------------------------------------------


def _no_triton() -> str:
    return "" if importlib.util.find_spec("triton") else "Triton is not installed: pip install triton"


def _no_jiterator() -> str:
    return "" if hasattr(torch.cuda, "jiterator") else f"PyTorch {torch.__version__} has no torch.cuda.jiterator"


def _no_cupy() -> str:
    try:
        _kernel.import_cupy()
    except CudaError as error:
        return str(error)
    return ""


# ---- how each is made ---------------------------------------------------------------------------------------------------


def _build_cupyfused(scratch: Path) -> Call:
    if torch.cuda.is_available():
        _kernel.import_cupy()
    return fused


def _build_triton(scratch: Path) -> Call:
    from .triton_kernels import ScaleBiasClamp

    apply: Call = ScaleBiasClamp.apply
    return apply


def _build_jiterator(scratch: Path) -> Call:
    text = """template <typename T> T scale_bias_clamp(T x, T scale, T bias, T min_val, T max_val) {
        T v = x * scale + bias;
        return v < min_val ? min_val : v > max_val ? max_val : v;
    }"""
    function = torch.cuda.jiterator._create_jit_fn(text, min_val=BOUNDS[0], max_val=BOUNDS[1])
    return lambda x, scale, bias: function(x, scale, bias)


def _build_elementwise(scratch: Path) -> Call:
    cupy = _kernel.import_cupy()
    expression = f"y = min(max(x * scale + bias, {BOUNDS[0]}f), {BOUNDS[1]}f)"
    kernel: Call = cupy.ElementwiseKernel("float32 x, float32 scale, float32 bias", "float32 y", expression, "scale_bias_clamp")
    return kernel


def numpy_expression(x: Any, scale: Any, bias: Any) -> Any:
    """Compute the expression by NumPy's own operations."""
    return numpy.clip(x * scale + bias, *BOUNDS)


def _python_loop(x: list[float], scale: float, bias: list[float]) -> list[float]:
    low, high = BOUNDS
    y = []
    for one, offset in zip(x, bias):
        v = one * scale + offset
        y.append(low if v < low else high if v > high else v)
    return y


COMPOSED = Peer("composed torch", lambda scratch: composed)
COMPILED = Peer("torch.compile", lambda scratch: torch.compile(composed, dynamic=False), _no_triton)
CUPYFUSED = Peer("cupyfused", _build_cupyfused)
CUPY = Peer("cupy.ElementwiseKernel", _build_elementwise, _no_cupy, arrays="cupy", has_gradients=False)
OURS_ON_CUPY = Peer("cupyfused, CuPy arrays", _build_cupyfused, _no_cupy, arrays="cupy", has_gradients=False)

ON_GPU = (
    COMPOSED,
    COMPILED,
    Peer("Triton by hand", _build_triton, _no_triton),
    Peer("C++/CUDA extension", tutorial.build_extension, tutorial.no_extension),
    Peer("torch.cuda.jiterator", _build_jiterator, _no_jiterator, has_gradients=False),
    CUPY,
    Peer("CuPy + DLPack, textbook", tutorial.build_textbook, _no_cupy),
    OURS_ON_CUPY,
    CUPYFUSED,
)

ON_CPU = (
    Peer("Python loop", lambda scratch: _python_loop, arrays="list", has_gradients=False),
    Peer("C++ loop, one thread", tutorial.build_loop, tutorial.no_loop, arrays="numpy", has_gradients=False),
    Peer("NumPy", lambda scratch: numpy_expression, arrays="numpy", has_gradients=False),
    Peer("cupyfused, NumPy arrays", lambda scratch: fused, arrays="numpy", has_gradients=False),
    Peer("composed torch, CPU", lambda scratch: composed),
    Peer("cupyfused, CPU tensors", lambda scratch: fused),
)


# ---- arrays -------------------------------------------------------------------------------------------------------------


def converted(tensor: Tensor, arrays: str) -> Any:
    """Return a tensor's values as the arrays that a peer is called with; nothing is copied but into lists."""
    if arrays == "cupy":
        return _kernel.import_cupy().from_dlpack(tensor)
    if arrays == "numpy":
        return tensor.numpy()
    return tensor.tolist() if arrays == "list" else tensor


def to_tensor(result: Any) -> Tensor:
    """Return what a peer computed as a tensor."""
    return torch.as_tensor(result) if isinstance(result, (Tensor, numpy.ndarray, list)) else torch.utils.dlpack.from_dlpack(result)


@functools.cache
def by_name() -> dict[str, Peer]:
    """Return every peer under its name."""
    return {peer.name: peer for peer in (*ON_GPU, *ON_CPU)}
