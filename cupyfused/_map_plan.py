"""The plan of a forward call: one launch that writes the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import _layout
from ._launch import Launch
from ._layout import Ints, Layout
from ._parameters import fill_dims, fill_divider, map_struct
from ._plan import (
    Backend,
    Described,
    Storage,
    X,
    check_dims,
    choose_forms,
    choose_packets,
    fill_operand,
    fill_scalar,
    is_large,
    slot_format,
    split_tail,
    storage,
)
from ._repeat import Repeat, find_repeat
from ._source import BLOCK, Variant

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["REPEATING_ITEMS", "map_plan"]


def map_plan(op: Op, shape: Ints, operands: Sequence[Described], backend: Backend) -> Launch | None:
    """Plan a forward call: the returned launch takes the address of y, then an address or a number for each operand.

    `operands` are the result, then inputs and options. None if the result has no elements.
    """
    if 0 in shape:
        return None
    result, rest = operands[0], operands[1:]
    assert result.dtype is not None
    stored = storage(rest[: len(op.inputs)], result.dtype)
    tensors = operands[: 1 + len(op.inputs)]
    strides = [_layout.broadcast_strides(one.array, shape) if one.array else (0,) * len(shape) for one in tensors]
    layout = _layout.collapse(shape, strides, [k for k, one in enumerate(tensors) if one.array])
    check_dims(op, layout)
    walk = _walk(layout, tensors, stored)
    stored_as = (stored.x, stored.parameter, stored.result.stored, stored.result.arithmetic)
    variant = Variant(op, "forward", *stored_as, walk.width, walk.items, walk.forms, (), walk.large)
    parameters = map_struct(len(tensors), len(op.options), walk.large)()
    for k, (one, reach) in enumerate(zip(tensors, walk.reaches)):
        fill_operand(parameters, k, one, reach.strides, reach.width)
        parameters.item_stride[k] = reach.item_stride
    for k, one in enumerate(operands[len(tensors) :]):
        fill_scalar(parameters.scalar[k], one)
    fill_dims(parameters.dim, walk.extents)
    for name in ("items_extent", "threads", "packets", "tail", "period"):
        setattr(parameters, name, getattr(walk, name))
    fill_divider(parameters.period_divider, walk.period)
    parameters.ndim = len(walk.extents)
    slots = "".join(slot_format(one, stored, exact=k >= len(tensors)) for k, one in enumerate(operands))
    return Launch(backend.load(variant), (-(-walk.threads // BLOCK), 1), bytes(parameters), slots)


class _Reach(NamedTuple):
    """How the kernel reaches an operand's elements."""

    strides: Ints  # along the dims that an index is taken apart in
    width: int  # elements that dim 0 counts at once
    item_stride: int


class _Walk(NamedTuple):
    """How the result is shared out among threads; the names are those of the kernel's parameters."""

    width: int
    items: int
    forms: tuple[str, ...]
    large: bool
    reaches: list[_Reach]
    extents: Ints
    items_extent: int
    threads: int
    packets: int
    tail: int
    period: int = 1


def _walk(layout: Layout, tensors: Sequence[Described], stored: Storage) -> _Walk:
    """Walk the dims, a thread's items along dim 1 or, if there is one dim, along that."""
    packets = choose_packets(layout, [(k, one) for k, one in enumerate(tensors) if one.array], [0, X], stored)
    width, items = packets.width, packets.items
    if width == 1:
        repeat = find_repeat(layout, list(enumerate(tensors)), [0, X], stored)
        if repeat is not None:
            return _repeating_walk(layout, repeat, stored.packet)
    extents, tail = split_tail(layout.extents, width)
    reaches = [
        _Reach(
            tuple(stride * items if dim == 1 else stride for dim, stride in enumerate(own)),
            width,
            own[1] if len(own) > 1 else own[0] * width * BLOCK,
        )
        for own in layout.strides
    ]
    groups = tuple(-(-extent // items) if dim == 1 else extent for dim, extent in enumerate(extents))
    return _Walk(
        width,
        items,
        choose_forms(layout, tensors[1:], packets),
        is_large(layout, width),
        reaches,
        groups,
        items_extent=extents[1] if len(extents) > 1 else extents[0],
        threads=math.prod(groups) if len(extents) > 1 else BLOCK * -(-extents[0] // BLOCK // items),
        packets=extents[0],
        tail=tail,
    )


REPEATING_ITEMS = 4  # that share what a thread has gathered


def _repeating_walk(layout: Layout, repeat: Repeat, width: int) -> _Walk:
    """Walk x and the result as one dim, a thread's items a period apart."""
    packets = repeat.elements // width
    period = repeat.period // width
    period = min(period * -(-BLOCK // period), packets)  # at least a block, whose threads read side by side
    reaches = {
        "PACKETS": lambda own: _Reach((1,), width, period * width),
        "UNIFORM": lambda own: _Reach((0,), width, 0),
        "GATHERED": lambda own: _Reach(own[: len(repeat.extents)], 1, 0),
    }
    return _Walk(
        width,
        REPEATING_ITEMS,
        tuple(repeat.forms.values())[1:],
        False,
        [reaches[form](layout.strides[k]) for k, form in repeat.forms.items()],
        repeat.extents,
        items_extent=packets,
        threads=period * -(-packets // (period * REPEATING_ITEMS)),
        packets=packets,
        tail=repeat.elements % width,
        period=period,
    )
