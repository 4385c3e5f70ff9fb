"""The plan of a backward call: one pass over memory that writes and sums gradients, and the launch that finishes the sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _layout
from ._dtypes import BY_NAME, Dtype
from ._launch import Launch
from ._layout import Ints, Layout
from ._parameters import fill_dims, partials_struct, sum_struct
from ._plan import (
    MAX_ITEMS,
    Backend,
    Described,
    Packets,
    Storage,
    check_dims,
    choose_form,
    choose_packets,
    fill_operand,
    fill_scalar,
    is_large,
    slot_format,
    split_tail,
)
from ._source import BLOCK, Variant
from ._sums import Role, SumLayout, plan_sums

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["EVERY_DUTY", "SumPlan", "sum_plan"]


@dataclass(frozen=True)
class Pass:
    """One launch of a backward kernel and what finishes its sums."""

    launch: Launch
    workspace: tuple[int | None, ...]  # for each gradient where its partial sums begin, in elements; None: written straight
    finish: tuple[tuple[Launch, Ints], ...]  # launches of sum_partials, each with the gradients that it finishes


@dataclass(frozen=True)
class SumPlan:
    """A backward call, which needs a workspace of so many elements of a dtype."""

    passes: tuple[Pass, ...]
    workspace: int
    workspace_dtype: Dtype

    def run(
        self, stream: int, operands: Sequence[int | float], options: Sequence[int | float], gradients: Sequence[int], workspace: int
    ) -> None:
        """Launch everything. `gradients` are addresses, 0 where none is asked for; `workspace` is the address of the scratch."""
        size = self.workspace_dtype.size
        for one in self.passes:
            targets = [grad if begin is None else workspace + begin * size for grad, begin in zip(gradients, one.workspace)]
            one.launch(stream, *operands, *targets, *options)
            for launch, finished in one.finish:
                launch(stream, *(address for k in finished for address in (targets[k], gradients[k])))


@dataclass
class _Context:
    """What the steps of planning share."""

    op: Op
    operands: Sequence[Described]  # grad_out, inputs
    options: Sequence[Described]
    numbers: tuple[float, ...]
    gradients: Sequence[Described | None]
    stored: Storage
    layout: Layout
    summed: list[Ints | None]  # for each gradient a mark along each collapsed dim
    packets: Packets
    large: bool
    backend: Backend
    workspace: int = 0  # elements given out so far


def sum_plan(
    op: Op,
    shape: Ints,
    operands: Sequence[Described],
    options: Sequence[Described],
    numbers: tuple[float, ...],
    gradients: Sequence[Described | None],
    stored: Storage,
    backend: Backend,
) -> SumPlan:
    """Plan a backward call whose result had this shape.

    `operands` are grad_out and the inputs, `numbers` those of `Op.backward_numbers`; `gradients` describe what is to be written,
    None where not asked for.
    """
    entries = [*operands, *(one or Described() for one in gradients)]
    strides = [_layout.broadcast_strides(one.array, shape) if one.array else (0,) * len(shape) for one in entries]
    marks = [_summed_dims(one, shape) if one else None for one in gradients]
    first = len(operands)
    written = [first + k for k, own in enumerate(marks) if own is not None and not any(own)]
    arrays = [k for k, one in enumerate(operands) if one.array]
    layout = _layout.collapse(shape, strides, [*written, *arrays[1:], *arrays[:1]], [own for own in marks if own is not None])
    summed = [None if own is None else tuple(own[dim] for dim in layout.dims) or (0,) for own in marks]
    streams = [(k, one) for k, one in enumerate(entries) if one.array and (k < first or k in written)]
    check_dims(op, layout)
    packets = choose_packets(layout, streams, [1, *written], stored)
    if packets.width > 1:
        packets = packets._replace(items=1)  # two would take more registers than there are for four blocks at once
    if stored.x == "uint8" or (summed[0] is not None and any(summed[0])):
        # No instance of their own: images whose parameters are trained, and an x smaller than the result.
        packets = Packets(1, min(stored.packet, MAX_ITEMS), general=True)
    large = is_large(layout, packets.width)
    context = _Context(op, operands, options, numbers, gradients, stored, layout, summed, packets, large, backend)
    inner = layout.extents[0]
    whole = (inner - inner % packets.width, *layout.extents[1:])  # the first threads take the tail besides
    passes = plan_sums(whole, packets.width, packets.items, summed, backend.multiprocessors)
    planned = tuple(_plan_pass(context, one) for one in passes)
    return SumPlan(planned, context.workspace, BY_NAME[stored.result.arithmetic])


def _summed_dims(gradient: Described, shape: Ints) -> Ints:
    """Mark the dims that broadcasting added to an input: its gradient is summed along them."""
    assert gradient.array is not None
    own = (1,) * (len(shape) - len(gradient.array.shape)) + gradient.array.shape
    return tuple(int(extent == 1 and whole != 1) for extent, whole in zip(own, shape))


def _plan_pass(context: _Context, one: SumLayout) -> Pass:
    width, operands, count, large = context.packets.width, context.operands, len(context.gradients), context.large
    stored, extents = context.stored, context.layout.extents
    in_packets, tail = split_tail(extents, width)
    variant = _variant(context, one)
    parameters = sum_struct(len(operands), len(context.options), count, large)()
    for k, operand in enumerate(operands):
        fill_operand(parameters.operand[k], operand, _ordered(context.layout.strides[k], one.order), width)
    for k, option in enumerate(context.options):
        fill_scalar(parameters.scalar[k], option)
    begins, finish = [], []
    for k in range(count):
        begin, partial = _fill_gradient(context, one, parameters, k)
        begins.append(begin)
        if partial is not None:
            finish.append((k, partial))
    fill_dims(parameters.dims, [in_packets[dim] for dim in one.order])
    for name in ("loop", "loop_per_split", "positions", "splits", "tiles", "position_lanes", "loop_end"):
        setattr(parameters, name, getattr(one, name))
    parameters.loop_begin, parameters.ndim = int(one.has_position), len(extents)
    parameters.packets, parameters.tail = in_packets[0], tail
    for k, role in enumerate(one.roles):
        parameters.role[k] = role
    slots = "".join(slot_format(operand, stored) for operand in operands) + "Q" * count
    slots += "".join(slot_format(option, stored) for option in context.options)
    launch = Launch(context.backend.load(variant), (one.blocks, 1), bytes(parameters), slots)
    return Pass(launch, tuple(begins), _plan_finish(context, finish))


def _variant(context: _Context, one: SumLayout) -> Variant:
    stored, (width, items, general) = context.stored, context.packets
    forms = tuple(choose_form(operand, own, general) for operand, own in zip(context.operands[1:], context.layout.strides[1:]))
    stored_as = (stored.x, stored.parameter, stored.result.stored, stored.result.arithmetic)
    duties = _duties(one, general)
    return Variant(context.op, "backward", *stored_as, width, items, forms, duties, context.large, numbers=context.numbers)


# What an instance is compiled to do with a gradient (enum Duty). One instance for all roles would keep accumulators
# and conversions that its call does not need: on an H200 the three gradients of bfloat16 per channel fell from 82 to 66 %.
EVERY_DUTY = "STORES | SUMS | SUMS_ROWS"
# What is not wanted is told from what is stored when the kernel runs.
_DUTIES = {Role.UNWANTED: "STORES", Role.EACH: "STORES", Role.COLUMN: "SUMS", Role.ALL: "SUMS", Role.ROW: "SUMS_ROWS"}


def _duties(one: SumLayout, general: bool) -> tuple[str, ...]:
    """Return the duties of each gradient; the general instance does everything."""
    return tuple(EVERY_DUTY if general else _DUTIES[role] for role in one.roles)


def _ordered(strides: Ints, order: Ints) -> Ints:
    return tuple(strides[dim] for dim in order)


@dataclass(frozen=True)
class _Partial:
    """The partial sums of one gradient: (extent, stride in the workspace, stride in the gradient) a dim, innermost first."""

    kept: list[tuple[int, int, int]]
    reduced: list[tuple[int, int, int]]


def _fill_gradient(context: _Context, one: SumLayout, parameters: Any, k: int) -> tuple[int | None, _Partial | None]:
    """Write where a gradient's values or sums go; returns where its partial sums begin and what is left to add."""
    gradient, marks, role = context.gradients[k], context.summed[k], one.roles[k]
    target = parameters.operand[len(context.operands) + k]
    width = context.packets.width
    if gradient is None or marks is None or role is Role.UNWANTED:
        return None, None
    own = context.layout.strides[len(context.operands) + k]
    if role is Role.EACH:
        fill_operand(target, gradient, _ordered(own, one.order), width)
        return None, None
    extents = one.partial_extents(k, context.layout.extents, context.layout.extents[0])
    left = [(key, extent) for key, extent in extents.items() if isinstance(key, str) or marks[key]]
    if math.prod(extent for _, extent in left) == 1:
        fill_operand(target, gradient, _ordered(own, one.order), width)
        return None, None
    strides = dict(zip(extents, _layout.contiguous_strides(tuple(extents.values()))))
    place = tuple(strides.get(dim, 0) for dim in one.order)
    fill_operand(target, Described(BY_NAME[context.stored.result.arithmetic], gradient.array), place, width)
    parameters.split_stride[k], parameters.tile_stride[k] = strides.get("split", 0), strides.get("tile", 0)
    begin = context.workspace
    context.workspace += math.prod(extents.values())
    kept = [(extents[dim], strides[dim], own[dim]) for dim in reversed(extents) if isinstance(dim, int) and not marks[dim]]
    reduced = [(extent, strides[key], 0) for key, extent in reversed(left) if extent > 1]
    return begin, _Partial([dim for dim in kept if dim[0] > 1], reduced)


_SUMS_A_THREAD = 16


def _columns(kept: int, reduced: int) -> int:
    """Kept elements that a block of the finishing kernel takes: neighbours read together, unless there is much to add to each."""
    columns = min(32, 1 << (kept - 1).bit_length())
    while columns > 1 and reduced * columns > _SUMS_A_THREAD * BLOCK:
        columns //= 2
    return columns


def _plan_finish(context: _Context, partials: list[tuple[int, _Partial]]) -> tuple[tuple[Launch, Ints], ...]:
    at_once = 1 if context.large else 3  # three sums with room for so many dims would not fit the 4 KB of parameters
    groups = [partials[begin : begin + at_once] for begin in range(0, len(partials), at_once)]
    return tuple((_finish_launch(context, group, at_once), tuple(k for k, _ in group)) for group in groups)


def _finish_launch(context: _Context, group: list[tuple[int, _Partial]], at_once: int) -> Launch:
    parameters = partials_struct(at_once, context.large)()
    blocks = 1
    for place, (k, partial) in enumerate(group):
        gradient, target = context.gradients[k], parameters.gradient[place]
        assert gradient is not None and gradient.dtype is not None
        target.kept = math.prod(extent for extent, _, _ in partial.kept)
        target.reduced = math.prod(extent for extent, _, _ in partial.reduced)
        target.columns = _columns(target.kept, target.reduced)
        target.kept_ndim, target.reduced_ndim = len(partial.kept), len(partial.reduced)
        fill_dims(target.kept_dims, [extent for extent, _, _ in partial.kept])
        fill_dims(target.reduced_dims, [extent for extent, _, _ in partial.reduced])
        for dim, (_, in_workspace, in_gradient) in enumerate(partial.kept):
            target.kept_operand[0].stride[dim], target.kept_operand[1].stride[dim] = in_workspace, in_gradient
        for dim, (_, in_workspace, _) in enumerate(partial.reduced):
            target.reduced_operand.stride[dim] = in_workspace
        target.kept_operand[1].dtype = gradient.dtype.code
        blocks = max(blocks, -(-target.kept // target.columns))
    arithmetic = context.stored.result.arithmetic
    variant = Variant(None, "sum_partials", "", "", "", arithmetic, large=context.large, gradients=at_once)
    slots = "QQ" * len(group)
    return Launch(context.backend.load(variant), (blocks, len(group)), bytes(parameters), slots)
