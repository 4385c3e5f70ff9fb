"""y = x * scale + bias."""

from __future__ import annotations

from typing import Any, TypeVar

from .._op import Op

__all__ = ["OP", "fused_scale_bias"]

Array = TypeVar("Array")


def _reference(namespace: Any, x: Any, scale: Any, bias: Any) -> Any:
    return x * scale + bias


OP = Op(
    name="fused_scale_bias",
    inputs=("x", "scale", "bias"),
    options=(),
    reference=_reference,
    reads={"x": ("scale",), "scale": ("x",), "bias": ()},
)


def fused_scale_bias(x: Array, scale: Any, bias: Any, *, out: Array | None = None, impl: str = "auto") -> Array:
    r"""Compute `x * scale + bias` in one kernel, and its gradients in one more.

    .. math:: y = x \cdot scale + bias

    Parameters
    ----------
    x : torch.Tensor, cupy.ndarray, numpy.ndarray or any array with `__dlpack__`
        Any shape, any strides; bool, integers, float16, bfloat16, float32 or float64.
    scale, bias : number or array of the same kind as x
        Anything that broadcasts with x, which may itself be the smaller one. A number is passed by value, a 0-dim CUDA tensor
        is read by the kernel: neither recompiles nor synchronises.
    out : array, optional
        Where to write the result: the exact shape, dtype and device; x itself, or memory that overlaps no input. No gradients.
    impl : {"auto", "cuda", "reference"}
        "auto" runs the kernel for CUDA arrays and the plain expression for others, in compiled graphs what `set_compile_mode`
        says; "reference" is the plain expression anywhere; "cuda" insists on the kernel.

    Returns
    -------
    array
        Of the kind and on the device of x, with the broadcast shape, PyTorch's promoted dtype and the strides of the composed
        expression. Never a view of an input. 16-bit floats are computed in float32 and rounded once; integers wrap.

    Raises
    ------
    OperandError
        A ValueError: shapes that do not broadcast, devices that differ, an `out` that does not fit.
    DtypeError
        A TypeError: not an array, an array of another kind than x, or a dtype without a kernel (complex, object, float8).
    CudaError
        A CUDA array where CuPy, NVRTC or the driver is missing; the message names the command that brings it.

    Notes
    -----
    Gradients of PyTorch tensors, for x, scale and bias, each summed to its own shape in the same pass::

        grad_x = grad_out * scale     grad_scale = grad_out * x     grad_bias = grad_out

    Sums are float32 (float64 for float64) and repeat bit for bit. Gradients of gradients run the composed expression.

    Examples
    --------
    >>> import numpy as np
    >>> fused_scale_bias(np.array([1.0, 2.0, 3.0]), 2.0, np.array([0.5, 0.0, -0.5]))
    array([2.5, 4. , 5.5])
    """
    return OP(x, scale, bias, out=out, impl=impl)  # type: ignore[no-any-return]
