"""An op as its contract sees it, the one table of tolerances, and the comparisons that every check is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from layouts import Shapes, draw, lay
from targets import Target
from torch import Tensor

__all__ = ["FLOATS", "INTEGERS", "TOLERANCE", "OpUnderTest", "assert_close", "assert_same", "check_forward", "check_gradients", "draw_arguments", "snapshot"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Options = tuple[Any, ...]

# (relative, absolute): one rounding to the dtype, and the arithmetic before it for data of order one. Sums may be off by the
# absolute part times the root of what they add. A test may ask for less, never for more.
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (2.0**-11, 4e-6),
    torch.bfloat16: (2.0**-8, 4e-6),
    torch.float32: (2.0**-24, 4e-6),
    torch.float64: (2.0**-53, 1e-14),
}
KINK = 1e-3  # nearer to where the gradient jumps, rounding may decide on which side an element falls


@dataclass(frozen=True)
class OpUnderTest:
    """What the contract needs to know of an op.

    Parameters
    ----------
    call
        The public function.
    function
        The name of its `autograd.Function` in `cupyfused`.
    composed
        The same by PyTorch operations, on inputs and options.
    inputs
        The names of its inputs, the first of them `x`.
    reads
        For each input, what its gradient reads if no option is given.
    reads_with_options
        What every gradient reads besides, if one is.
    options, integer_options
        Sets of options to run floating and integer results with. A number in them is exact in every floating dtype.
    distance_to_kink
        How far each element is from where its gradient jumps; None for an op without such places.
    """

    call: Callable[..., Any]
    function: str
    composed: Callable[..., Tensor]
    inputs: tuple[str, ...]
    reads: Mapping[str, frozenset[str]]
    reads_with_options: frozenset[str] = frozenset()
    options: tuple[Options, ...] = ((),)
    integer_options: tuple[Options, ...] = ((),)
    distance_to_kink: Callable[..., Tensor] | None = None
    takes_bool: bool = True


def draw_arguments(
    op: OpUnderTest, generator: torch.Generator, shapes: Shapes, dtypes: Sequence[torch.dtype], device: str, layouts: Sequence[str] = ("contiguous",)
) -> list[Tensor]:
    """Return fresh inputs of these shapes; the last dtype and layout serve for all inputs that have none of their own."""
    pick = lambda of, k: of[min(k, len(of) - 1)]  # noqa: E731
    count = range(len(op.inputs))
    return [lay(draw(generator, shapes[k], pick(dtypes, k), device), pick(layouts, k)) for k in count]


def in_float64(values: Sequence[Any]) -> list[Any]:
    """Return what is exact: tensors as float64, other arguments as they are."""
    return [value.detach().double() if isinstance(value, Tensor) else value for value in values]


# ---- comparing ----------------------------------------------------------------------------------------------------------


def assert_close(actual: Tensor, expected: Tensor, computed_in: torch.dtype | None = None, added: float = 1) -> None:
    """Compare with a float64 result. `computed_in`: the dtype of the arithmetic if it is coarser; `added`: terms of a sum."""
    relative, absolute = (max(pair) for pair in zip(TOLERANCE[actual.dtype], TOLERANCE[computed_in or actual.dtype]))
    torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=absolute * math.sqrt(max(added, 1)), equal_nan=True)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Compare values, NaN included, and dtype and shape; nothing may differ."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def snapshot(values: Sequence[Any]) -> list[Tensor]:
    """Copy everything in the memory of the tensors, gaps between their elements included."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()).clone() for value in tensors]


def assert_unwritten(values: Sequence[Any], before: Sequence[Tensor]) -> None:
    for now, then in zip(snapshot(values), before, strict=True):
        assert torch.equal(now, then), "an input was written to"


def assert_own_memory(result: Tensor, values: Sequence[Any]) -> None:
    places = {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor) and value.numel()}
    assert result.untyped_storage().data_ptr() not in places, "the result shares memory with an input"


def check_forward(op: OpUnderTest, target: Target, arguments: Sequence[Any], options: Options) -> Tensor:
    """Check values against float64, and dtype, shape, strides and device against the composed expression in the same dtypes."""
    before = snapshot(arguments)
    y: Tensor = target.run(op.call, *arguments, *options)
    composed = op.composed(*arguments, *options)
    assert (y.dtype, y.shape, y.device) == (composed.dtype, composed.shape, composed.device)
    assert y.stride() == composed.stride()
    if y.dtype.is_floating_point:
        assert_close(y, op.composed(*in_float64(arguments), *in_float64(options)))
    else:
        assert_same(y, composed)
    assert_unwritten(arguments, before)
    assert_own_memory(y, arguments)
    return y


def mask_kinks(op: OpUnderTest, grad_out: Tensor, arguments: Sequence[Any], options: Options) -> Tensor:
    """Return `grad_out` with 0 where rounding may decide which gradient is right; in the same layout."""
    if op.distance_to_kink is None:
        return grad_out
    near = op.distance_to_kink(*in_float64(arguments), *in_float64(options)) < KINK
    if near.any():
        for dim, stride in enumerate(grad_out.stride()):
            if stride == 0:  # one element of memory stands for all of them
                near = near.any(dim, keepdim=True).expand(grad_out.shape)
        grad_out.detach().copy_(torch.where(near, 0, grad_out)) if 0 not in grad_out.stride() else None
    return grad_out
