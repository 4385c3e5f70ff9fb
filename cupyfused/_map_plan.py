"""The plan of a forward call: one launch that writes the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import _layout
from ._launch import Launch
from ._layout import Ints, Layout
from ._parameters import fill_dims, map_struct
from ._plan import (
    Backend,
    Described,
    Storage,
    check_dims,
    choose_form,
    choose_packets,
    fill_operand,
    fill_scalar,
    is_large,
    slot_format,
    split_tail,
    storage,
)
from ._source import BLOCK, Variant

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["map_plan"]


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
        fill_operand(parameters.operand[k], one, reach.strides, reach.width)
        parameters.item_stride[k] = reach.item_stride
    for k, one in enumerate(operands[len(tensors) :]):
        fill_scalar(parameters.scalar[k], one)
    fill_dims(parameters.dims, walk.extents)
    for name in ("items_extent", "threads", "packets", "tail"):
        setattr(parameters, name, getattr(walk, name))
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


def _walk(layout: Layout, tensors: Sequence[Described], stored: Storage) -> _Walk:
    """Walk the dims, a thread's items along dim 1 or, if there is one dim, along that."""
    width, items, general = choose_packets(layout, [(k, one) for k, one in enumerate(tensors) if one.array], [0, 1], stored)
    if width == 1:
        flat = _flat_walk(layout, tensors, stored)
        if flat is not None:
            return flat
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
        tuple(choose_form(one, own, general) for one, own in zip(tensors[1:], layout.strides[1:])),
        is_large(layout, width),
        reaches,
        groups,
        items_extent=extents[1] if len(extents) > 1 else extents[0],
        threads=math.prod(groups) if len(extents) > 1 else BLOCK * -(-extents[0] // BLOCK // items),
        packets=extents[0],
        tail=tail,
    )


def _flat_walk(layout: Layout, tensors: Sequence[Described], stored: Storage) -> _Walk | None:
    """Walk x and the result as one dim in packets, whatever the width of their rows, and gather the others element by element.

    None where that cannot be. An odd width in float32 reached 88 % of a copy's rate one by one on an H200.
    """
    packet, extents = stored.packet, layout.extents
    if stored.x == "any_dtype" or not stored.result.is_floating or packet == 1 or is_large(layout, 1) or extents[0] < packet:
        return None
    one_after_another = tuple(math.prod(extents[:dim]) for dim in range(len(extents)))
    forms, reaches = [], []
    for one, own in zip(tensors, layout.strides):
        is_aligned = one.dtype is not None and one.alignment % (packet * one.dtype.size) == 0
        if one.array is not None and own == one_after_another and is_aligned:
            forms.append("PACKETS")
            reaches.append(_Reach((1,), packet, packet * BLOCK))
        elif not any(own):
            forms.append("UNIFORM")
            reaches.append(_Reach((0,), packet, 0))
        else:
            forms.append("GATHERED")
            reaches.append(_Reach(own, 1, 0))
    if forms[:2] != ["PACKETS", "PACKETS"] or "GATHERED" not in forms:
        return None  # by that form the kernel knows that it walks flat
    count = math.prod(extents)
    packets = count // packet
    threads = BLOCK * -(-packets // BLOCK)
    return _Walk(packet, 1, tuple(forms[1:]), False, reaches, extents, packets, threads, packets, count % packet)
