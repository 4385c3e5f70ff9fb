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

__all__ = [
    "FLOATS",
    "INTEGERS",
    "TOLERANCE",
    "Function",
    "OpUnderTest",
    "Options",
    "assert_agree",
    "assert_close",
    "assert_own_memory",
    "assert_same",
    "assert_unwritten",
    "check_forward",
    "check_gradients",
    "draw_arguments",
    "draw_gradient",
    "in_float64",
    "snapshot",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Options = tuple[Any, ...]
Function = Callable[..., Tensor]

# (relative, absolute): one rounding to the dtype, and the arithmetic before it for data of order one. What sums add to that is
# in `assert_close`. A test may ask for less, never for more.
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (2.0**-11, 4e-6),
    torch.bfloat16: (2.0**-8, 4e-6),
    torch.float32: (2.0**-24, 4e-6),
    torch.float64: (2.0**-53, 1e-14),
}
KINK = 1e-5  # float32 arithmetic on data of order one is off by 2e-6 at most


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

    @property
    def registered(self) -> Any:
        """The operator of `torch.ops`."""
        return getattr(torch.ops.cupyfused, self.call.__name__).default

    def fused(self, target: Target, options: Options) -> Function:
        """The op on its inputs alone, on a target."""
        return lambda *values: target.run(self.call, *values, *options)

    def plain(self, options: Options) -> Function:
        """The composed expression on the inputs alone."""
        return lambda *values: self.composed(*values, *options)

    def both(self, target: Target, options: Options) -> tuple[Function, Function]:
        """The op and the composed expression."""
        return self.fused(target, options), self.plain(options)


def draw_arguments(
    op: OpUnderTest,
    generator: torch.Generator,
    shapes: Shapes,
    dtypes: Sequence[torch.dtype],
    device: str,
    layouts: Sequence[str] = ("contiguous",),
    *,
    smooth: bool = False,
) -> list[Tensor]:
    """Return fresh inputs of these shapes; the last dtype and layout serve for all inputs that have none of their own.

    `smooth`: drawn again until no gradient depends on rounding.
    """

    def pick(of: Sequence[Any], k: int) -> Any:
        return of[min(k, len(of) - 1)]

    for _ in range(1000):
        drawn = [lay(draw(generator, shapes[k], pick(dtypes, k), device), pick(layouts, k)) for k in range(len(op.inputs))]
        if not smooth or near_kink(op, drawn) is None:
            return drawn
    raise AssertionError(f"no inputs of shapes {shapes} whose elements all keep away from kinks")


def near_kink(op: OpUnderTest, arguments: Sequence[Any]) -> Tensor | None:
    """Mark elements so near to where their gradient jumps that rounding decides on which side they fall; None: there are none."""
    if op.distance_to_kink is None:
        return None
    distances = [op.distance_to_kink(*in_float64(arguments), *options) for options in op.options]
    near = torch.stack([distance < KINK for distance in distances]).any(0)
    return near if near.any() else None


def in_float64(values: Sequence[Any]) -> list[Any]:
    """Return what is exact: tensors as float64, other arguments as they are."""
    return [value.detach().double() if isinstance(value, Tensor) else value for value in values]


# ---- comparing ----------------------------------------------------------------------------------------------------------


def assert_close(actual: Tensor, expected: Tensor, computed_in: torch.dtype | None = None, added: float = 1) -> None:
    """Compare with a float64 result. `computed_in`: the dtype of the arithmetic; `added`: terms of a sum."""
    relative, absolute = TOLERANCE[actual.dtype]
    relative_step, absolute_step = TOLERANCE[computed_in or actual.dtype]
    added = max(added, 1)
    # A sum in pairs of pairs rounds log2(added) times; what its terms were rounded by adds up like a random walk.
    relative += relative_step * math.log2(added)
    absolute = max(absolute, absolute_step) * math.sqrt(added)
    torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=absolute, equal_nan=True)


def assert_agree(actual: Tensor, expected: Tensor, added: float = 256) -> None:
    """Compare what two routes make of a few hundred terms: the tolerance of the dtype, for values brought to order one."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    exact = expected.detach().double()
    finite = exact[exact.isfinite()].abs()
    size = max(1.0, float(finite.max())) if finite.numel() else 1.0
    relative, absolute = TOLERANCE[actual.dtype]
    allowed = {"rtol": relative, "atol": absolute * size * math.sqrt(added)}
    torch.testing.assert_close(actual.detach().double(), exact, **allowed, equal_nan=True)


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


def check_gradients(
    op: OpUnderTest,
    target: Target,
    arguments: Sequence[Any],
    options: Options,
    grad_out: Tensor,
    wanted: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    """Check gradients against float64: values, shapes, dtypes, repeated bit for bit, only those asked for, nothing written to."""
    asked = [
        isinstance(value, Tensor) and value.is_floating_point() and (wanted is None or wanted[k])
        for k, value in enumerate(arguments)
    ]
    leaves = [value.detach().requires_grad_(one) if isinstance(value, Tensor) else value for value, one in zip(arguments, asked)]
    before = snapshot([*leaves, grad_out])
    y = target.run(op.call, *leaves, *options)
    inputs = [leaf for leaf, one in zip(leaves, asked) if one]
    found = torch.autograd.grad(y, inputs, grad_out, retain_graph=True)
    for first, second in zip(found, torch.autograd.grad(y, inputs, grad_out), strict=True):
        assert_same(second, first)
    assert_unwritten([*leaves, grad_out], before)
    exact = [value.requires_grad_(one) if isinstance(value, Tensor) else value for value, one in zip(in_float64(arguments), asked)]
    exact_y = op.composed(*exact, *in_float64(options))
    expected = torch.autograd.grad(exact_y, [leaf for leaf, one in zip(exact, asked) if one], grad_out.double())
    arithmetic = torch.float64 if y.dtype is torch.float64 else torch.float32
    for gradient, leaf, right in zip(found, inputs, expected, strict=True):
        assert (gradient.dtype, gradient.shape, gradient.device) == (leaf.dtype, leaf.shape, leaf.device)
        assert_close(gradient, right, arithmetic, added=y.numel() / max(leaf.numel(), 1))
        assert_own_memory(gradient, [grad_out, *leaves] if target.runs_kernels else leaves)  # composed addition hands grad_out on
    gradients = iter(found)
    return [next(gradients) if one else None for one in asked]


def draw_gradient(
    op: OpUnderTest, generator: torch.Generator, arguments: Sequence[Any], options: Options, layout: str = "contiguous"
) -> Tensor:
    """Draw an incoming gradient for a result, 0 where rounding decides what is right."""
    y = op.composed(*arguments, *options)
    values = draw(generator, y.shape, y.dtype, str(y.device))
    near = near_kink(op, arguments)
    return lay(values if near is None else values.masked_fill(near, 0), layout)
