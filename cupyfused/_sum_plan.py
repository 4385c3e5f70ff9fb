"""The plan of a backward call: one pass over memory that writes and sums gradients, and the launch that finishes the sums."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _layout
from ._dtypes import BY_NAME, Dtype
from ._finish_plan import Partial, plan_finish
from ._launch import Launch
from ._layout import Ints, Layout
from ._parameters import fill_dims, fill_divider, sum_struct
from ._plan import (
    MAX_ITEMS,
    Backend,
    Described,
    Packets,
    Storage,
    X,
    check_dims,
    choose_forms,
    choose_packets,
    fill_operand,
    fill_scalar,
    is_large,
    slot_format,
)
from ._repeat import Repeat, find_repeat
from ._source import SMALL_DIMS, Variant
from ._sums import Role, SumLayout, plan_repeats, plan_sums

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
    backend: Backend
    layout: Layout
    summed: list[Ints | None]  # for each gradient a mark along each collapsed dim
    workspace: int = 0  # elements given out so far


class _Iteration(NamedTuple):
    """What one launch goes over: the collapsed dims, or, where they repeat, periods."""

    packets: Packets
    large: bool
    forms: tuple[str, ...]  # for each input
    extents: Ints
    strides: Sequence[Ints]  # of each operand and gradient
    summed: Sequence[Ints | None]
    elements: int  # along dim 0; of the whole call, where they repeat
    repeat: Repeat | None = None


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
    check_dims(op, layout)
    context = _Context(op, operands, options, numbers, gradients, stored, backend, layout, summed)
    passes = tuple(_plan_pass(context, iteration, one) for iteration, one in _iterations(context, entries, written))
    return SumPlan(passes, context.workspace, BY_NAME[stored.result.arithmetic])


def _iterations(context: _Context, entries: Sequence[Described], written: Sequence[int]) -> Iterator[tuple[_Iteration, SumLayout]]:
    """Yield the passes over memory, one wherever possible."""
    layout, stored, operands, summed = context.layout, context.stored, context.operands, context.summed
    multiprocessors = context.backend.multiprocessors
    streams = [(k, one) for k, one in enumerate(entries) if one.array and (k < len(operands) or k in written)]
    packets = choose_packets(layout, streams, [X, *written], stored)
    if stored.x == "uint8" or (summed[0] is not None and any(summed[0])):
        # No instance of their own: images whose parameters are trained, and an x smaller than the result.
        packets = Packets(1, min(stored.packet, MAX_ITEMS), general=True)
    elif packets.width == 1:
        repeating = _repeating(context, entries, written)
        if repeating is not None:
            yield repeating
            return
    else:
        packets = packets._replace(items=1)  # two would take more registers than there are for four blocks at once
    extents, inner = layout.extents, layout.extents[0]
    forms = choose_forms(layout, operands[1:], packets)
    iteration = _Iteration(packets, is_large(layout, packets.width), forms, extents, layout.strides, summed, inner)
    whole = (inner - inner % packets.width, *extents[1:])  # the tail comes besides
    for one in plan_sums(whole, packets.width, packets.items, summed, multiprocessors):
        yield iteration, one


def _repeating(context: _Context, entries: Sequence[Described], written: Sequence[int]) -> tuple[_Iteration, SumLayout] | None:
    """Return the one pass that goes from period to period, None where there is none."""
    layout, stored, summed, inputs = context.layout, context.stored, context.summed, range(1, len(context.operands))
    sums = [own for own in summed if own is not None and any(own)]
    full = [k for k in (X, *written) if entries[k].array]
    repeat = find_repeat(layout, [(k, entries[k]) for k in (0, *inputs, *written)], full, stored, sums)
    if repeat is None or repeat.period >= repeat.elements or 2 + len(repeat.extents) > SMALL_DIMS:
        return None
    extents, dims = (repeat.period, -(-repeat.elements // repeat.period)), len(repeat.extents)
    marks = [None if own is None else (int(all(own)), int(any(own))) for own in summed]
    one = plan_repeats(extents, stored.packet, marks, context.backend.multiprocessors)
    if one is None:
        return None
    reach = {"PACKETS": (1, repeat.period), "UNIFORM": (0, 0), "GATHERED": (0, 0)}
    strides = [
        reach[repeat.forms.get(k, "UNIFORM")] + (own[:dims] if repeat.forms.get(k) == "GATHERED" else ())
        for k, own in enumerate(layout.strides)
    ]
    forms = tuple(repeat.forms[k] for k in inputs)
    return _Iteration(Packets(stored.packet, 1, False), False, forms, extents, strides, marks, repeat.elements, repeat), one


def _summed_dims(gradient: Described, shape: Ints) -> Ints:
    """Mark the dims that broadcasting added to an input: its gradient is summed along them."""
    assert gradient.array is not None
    own = (1,) * (len(shape) - len(gradient.array.shape)) + gradient.array.shape
    return tuple(int(extent == 1 and whole != 1) for extent, whole in zip(own, shape))


def _plan_pass(context: _Context, iteration: _Iteration, one: SumLayout) -> Pass:
    width, operands, count = iteration.packets.width, context.operands, len(context.gradients)
    stored, extents = context.stored, (iteration.extents[0] // width, *iteration.extents[1:])
    gathered = iteration.repeat.extents if iteration.repeat else ()
    parameters = sum_struct(len(operands), len(context.options), count, iteration.large)()
    for k, operand in enumerate(operands):
        fill_operand(parameters, k, operand, _ordered(iteration.strides[k], one.order), width)
    for k, option in enumerate(context.options):
        fill_scalar(parameters.scalar[k], option)
    begins, finish = [], []
    for k, role in enumerate(one.roles):
        begin, partial = _fill_gradient(context, iteration, one, parameters, k)
        begins.append(begin)
        parameters.role[k] = role
        if partial is not None:
            finish.append(partial)
    fill_dims(parameters.dim, [*(extents[dim] for dim in one.order), *gathered])
    for name in ("loop", "loop_per_split", "positions", "tiles", "loop_end"):
        setattr(parameters, name, getattr(one, name))
    fill_divider(parameters.tile_divider, one.tiles)
    parameters.lane_bits = one.position_lanes.bit_length() - 1
    parameters.loop_begin, parameters.ndim, parameters.gathered_ndim = int(one.has_position), len(extents), len(gathered)
    parameters.packets, parameters.tail = divmod(iteration.elements, width)
    parameters.tail_position = parameters.packets % one.positions if gathered else 0
    slots = "".join(slot_format(operand, stored) for operand in operands) + "Q" * count
    slots += "".join(slot_format(option, stored) for option in context.options)
    launch = Launch(
        context.backend.load(_variant(context, iteration, one)), (one.grid * one.tiles, one.splits), bytes(parameters), slots
    )
    return Pass(launch, tuple(begins), plan_finish(context.backend, stored.result.arithmetic, iteration.large, finish))


def _variant(context: _Context, iteration: _Iteration, one: SumLayout) -> Variant:
    stored, packets = context.stored, iteration.packets
    stored_as = (stored.x, stored.parameter, stored.result.stored, stored.result.arithmetic, packets.width, packets.items)
    duties = tuple(EVERY_DUTY if packets.general else _DUTIES[role] for role in one.roles)
    return Variant(context.op, "backward", *stored_as, iteration.forms, duties, iteration.large, numbers=context.numbers)


# What an instance is compiled to do with a gradient (enum Duty). One instance for all roles would keep accumulators
# and conversions that its call does not need: on an H200 the three gradients of bfloat16 per channel fell from 82 to 66 %.
EVERY_DUTY = "STORES | SUMS | SUMS_ROWS"
# What is not wanted is told from what is stored when the kernel runs.
_DUTIES = {Role.UNWANTED: "STORES", Role.EACH: "STORES", Role.COLUMN: "SUMS", Role.ALL: "SUMS", Role.ROW: "SUMS_ROWS"}


def _ordered(strides: Ints, order: Ints) -> Ints:
    """Return the strides along the kernel's dims; after those of the iteration come those that lead to what is gathered."""
    return tuple(strides[dim] for dim in order) + strides[len(order) :]


def _fill_gradient(
    context: _Context, iteration: _Iteration, one: SumLayout, parameters: Any, k: int
) -> tuple[int | None, Partial | None]:
    """Write where a gradient's values or sums go; returns where its partial sums begin and what is left to add."""
    gradient, marks, role, entry = context.gradients[k], iteration.summed[k], one.roles[k], len(context.operands) + k
    width = iteration.packets.width
    if gradient is None or marks is None or role is Role.UNWANTED:
        return None, None
    straight = _ordered(iteration.strides[entry], one.order)
    if role is Role.EACH:
        fill_operand(parameters, entry, gradient, straight, width)
        return None, None
    extents = one.partial_extents(k, iteration.extents, iteration.extents[0])
    kept = [dim for dim in reversed(extents) if isinstance(dim, int) and not marks[dim]]  # innermost first
    left = [key for key in extents if key not in kept]
    reduced = math.prod(extents[key] for key in left)
    in_layout = context.layout.strides[entry]
    if iteration.repeat is not None and role is Role.COLUMN:
        place, partial = _repeating_sums(context, iteration.repeat, k, reduced)
    elif reduced == 1:
        fill_operand(parameters, entry, gradient, straight, width)
        return None, None
    else:
        place = dict(zip([*kept, *left], accumulate((extents[key] for key in [*kept, *left]), operator.mul, initial=1)))
        partial = Partial(k, gradient, [(extents[dim], in_layout[dim]) for dim in kept if extents[dim] > 1], reduced)
    in_workspace = Described(BY_NAME[context.stored.result.arithmetic], gradient.array)
    fill_operand(parameters, entry, in_workspace, tuple(place.get(dim, 0) for dim in one.order), width)
    parameters.split_stride[k], parameters.tile_stride[k] = place.get("split", 0), place.get("tile", 0)
    begin = context.workspace
    context.workspace += math.prod(extents.values())
    return begin, partial


def _repeating_sums(context: _Context, repeat: Repeat, k: int, splits: int) -> tuple[dict[int | str, int], Partial]:
    """Return where the sums for each element of the period lie, of which a gradient keeps some dims, and what is left to add."""
    gradient, marks, layout = context.gradients[k], context.summed[k], context.layout
    assert gradient is not None and marks is not None
    kept = [dim for dim, mark in enumerate(marks) if not mark]
    own = [(layout.extents[dim], layout.strides[len(context.operands) + k][dim]) for dim in kept]
    repeats = repeat.period // math.prod(extent for extent, _ in own)
    inner = math.prod(layout.extents[: kept[0]])
    return {0: 1, "split": repeat.period}, Partial(k, gradient, own, splits * repeats, inner)
