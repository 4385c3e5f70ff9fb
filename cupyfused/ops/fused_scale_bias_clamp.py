"""y = clamp(x * scale + bias, min_val, max_val)."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from .._op import Op
from .fused_scale_bias import fused_scale_bias

__all__ = ["OP", "fused_scale_bias_clamp"]

Array = TypeVar("Array")


def _reference(namespace: Any, x: Any, scale: Any, bias: Any, min_val: Any, max_val: Any) -> Any:
    v = x * scale + bias
    return v if min_val is None and max_val is None else namespace.clip(v, min_val, max_val)


def _traced_reference(
    namespace: Any, x: Any, scale: Any, bias: Any, min_val: Any, max_val: Any, at_bound: float, at_equal: float, at_nan: float
) -> Any:
    y = _reference(namespace, x, scale, bias, min_val, max_val)
    if (min_val is None and max_val is None) or (at_bound, at_equal, at_nan) not in ((1, 1, 0), (0, 0, 0)):
        return y
    v = x * scale + bias
    sides = [] if min_val is None else [v >= min_val if at_bound else v > min_val]
    sides += [] if max_val is None else [v <= max_val if at_bound else v < max_val]
    return namespace.where(sides[0] & sides[-1], v, y.detach())


def _clamp_rule(as_tensors: bool) -> tuple[float, float, float]:
    """Ask the installed PyTorch what the gradient of clamp is worth at a bound, where both bounds are equal, and at NaN.

    Up to 2.13 it is 1, 1, 0. In 2.14 bounds that are numbers give 0, 0, 0, and tensors 0.5, 1, 1.
    """
    import torch

    def weight(value: float, low: float, high: float) -> float:
        bounds = (torch.tensor(low), torch.tensor(high)) if as_tensors else (low, high)
        with torch.enable_grad():
            x = torch.tensor(value, requires_grad=True)
            (gradient,) = torch.autograd.grad(torch.clamp(x, *bounds), x)
        return float(gradient)

    return weight(0.0, 0.0, 1.0), weight(0.0, 0.0, 0.0), weight(math.nan, 0.0, 1.0)


OP = Op(
    name="fused_scale_bias_clamp",
    inputs=("x", "scale", "bias"),
    options=("min_val", "max_val"),
    reference=_reference,
    reads={"x": ("scale",), "scale": ("x",), "bias": ()},
    reads_with_options=("x", "scale", "bias"),
    backward_numbers=("at_bound", "at_equal_bounds", "at_nan"),
    rules=_clamp_rule,
    traced_reference=_traced_reference,
    takes_bool=False,
)


def fused_scale_bias_clamp(
    x: Array, scale: Any, bias: Any, min_val: Any = None, max_val: Any = None, *, out: Array | None = None, impl: str = "auto"
) -> Array:
    r"""Compute `clamp(x * scale + bias, min_val, max_val)` in one kernel, and its gradients in one more.

    .. math:: y = \min(\max(x \cdot scale + bias,\ min\_val),\ max\_val)

    Parameters
    ----------
    x : torch.Tensor, cupy.ndarray, numpy.ndarray or any array with `__dlpack__`
        Any shape, any strides; integers, float16, bfloat16, float32 or float64.
    scale, bias : number or array of the same kind as x
        Anything that broadcasts with x, which may itself be the smaller one. A number is passed by value, a 0-dim CUDA tensor
        is read by the kernel: neither recompiles nor synchronises.
    min_val, max_val : number, None or 0-dim array
        None leaves that side open. As in `torch.clamp`, max_val wins where min_val is larger, NaN passes through, and a NaN
        bound makes everything NaN. No gradient is taken of a bound.
    out : array, optional
        Where to write the result: the exact shape, dtype and device; x itself, or memory that overlaps no input. No gradients.
    impl : {"auto", "cuda", "reference"}
        "auto" runs the kernel for CUDA arrays and the plain expression for others, in compiled graphs what `set_compile_mode`
        says; "reference" is the plain expression anywhere; "cuda" insists on the kernel.

    Returns
    -------
    array
        Of the kind and on the device of x, with the broadcast shape, PyTorch's promoted dtype (a float bound promotes integers)
        and the strides of the composed expression. Never a view of an input. 16-bit floats are computed in float32 and rounded
        once; integers wrap.

    Raises
    ------
    OperandError
        A ValueError: shapes that do not broadcast, devices that differ, a bound with dims or one that asks for a gradient, an
        integer bound that the result's dtype does not hold, an `out` that does not fit.
    DtypeError
        A TypeError: not an array, an array of another kind than x, or a dtype without a kernel (complex, object, float8).
    CudaError
        A CUDA array where CuPy, NVRTC or the driver is missing; the message names the command that brings it.

    Notes
    -----
    Gradients of PyTorch tensors, for x, scale and bias, each summed to its own shape in the same pass. With g = grad_out where
    the value is inside the bounds, else 0::

        grad_x = g * scale     grad_scale = g * x     grad_bias = g

    Exactly at a bound the gradient is the one that the installed PyTorch gives `torch.clamp`. Sums are float32 (float64 for
    float64) and repeat bit for bit. Gradients of gradients run the composed expression.

    Examples
    --------
    >>> import numpy as np
    >>> fused_scale_bias_clamp(np.array([-2.0, 0.5, 3.0]), 2.0, 0.5, min_val=-1.0, max_val=4.0)
    array([-1. ,  1.5,  4. ])
    """
    if min_val is None and max_val is None:
        return fused_scale_bias(x, scale, bias, out=out, impl=impl)
    return OP(x, scale, bias, min_val, max_val, out=out, impl=impl)  # type: ignore[no-any-return]
