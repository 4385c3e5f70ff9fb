"""Plans: everything about a call that can be decided once for a signature.

A plan knows its kernels, grids and parameter bytes; running it takes a stream, the addresses of the call and its numbers.
Nothing here knows an array library: operands come as `Described`, memory as addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _layout
from ._dtypes import BY_NAME, Dtype
from ._kernel import BLOCK, LARGE_DIMS, SMALL_DIMS, Variant
from ._launch import Launch, Launcher
from ._layout import Ints, Layout, Strided
from ._parameters import INDEX_LIMIT, fill_dims, map_struct
from .errors import OperandError, message

if TYPE_CHECKING:
    from ._op import Op

__all__ = [
    "Backend",
    "Described",
    "Packets",
    "Storage",
    "choose_form",
    "choose_packets",
    "fill_operand",
    "fill_scalar",
    "fill_tail",
    "is_large",
    "map_plan",
    "slot_format",
    "storage",
]

ABSENT, NUMBER, ARRAY, VECTOR = range(4)  # enum Access of cuda_src/common.cuh
PACKET_BYTES = 16
_SLACK = 1 << 20  # indices beyond the last that a whole grid of threads may count
MAX_ITEMS = 4  # single elements a thread; each more makes the kernel longer to compile
# Pairs of x and result with a kernel of their own. Any other pair loads through a run-time switch: a kernel for each would be
# some 50 pairs, times what layouts and architectures make of them.
MIXED = {("uint8", "float32"), ("float16", "float32"), ("bfloat16", "float32")}


class Described(NamedTuple):
    """An operand as a plan sees it: an array by its geometry, a number by its dtype alone, an absent one by neither."""

    dtype: Dtype | None = None
    array: Strided | None = None
    alignment: int = 0  # address modulo 16


class Storage(NamedTuple):
    """How the operands of a call are stored; `any_dtype` where a kernel is told when it runs."""

    x: str
    parameter: str
    result: Dtype

    @property
    def packet(self) -> int:
        """Elements in 16 bytes of the widest operand of full size."""
        return PACKET_BYTES // max(self.result.size, BY_NAME[self.x].size if self.x in BY_NAME else 0)


class Packets(NamedTuple):
    """What one thread takes at once."""

    width: int
    items: int


@dataclass(frozen=True)
class Backend:
    """Where kernels run: how one is loaded, and how many multiprocessors the blocks are spread over."""

    name: str
    load: Callable[[Variant], Launcher]
    multiprocessors: int


def storage(inputs: Sequence[Described], result: Dtype) -> Storage:
    """Choose the instance for these dtypes: x and result as they are, the parameters all stored like the result, or `any_dtype`."""
    x, *parameters = inputs
    assert x.dtype is not None
    alike = all(one.array is None or one.dtype is result for one in parameters)
    known = x.dtype is result or (x.dtype.name, result.name) in MIXED
    if alike and known and result.category > 0:
        return Storage(x.dtype.name, result.name, result)
    return Storage("any_dtype", "any_dtype", result)


def choose_packets(layout: Layout, arrays: Sequence[tuple[int, Described]], full: Sequence[int], stored: Storage) -> Packets:
    """Take 16 bytes at once where every array allows it, else as many single elements.

    Dim 0 must be made of whole packets or be all there is; each of `arrays`, by its place in the layout, must have neighbours
    there, aligned in every row, or one element for all of them, which those in `full` cannot have. What needs a large instance
    takes single elements: there is none for packets.
    """
    packet = stored.packet
    single = Packets(1, min(packet, MAX_ITEMS))
    uneven = layout.extents[0] % packet and len(layout.extents) > 1
    if stored.x == "any_dtype" or packet == 1 or uneven or is_large(layout, packet):
        return single
    for k, one in arrays:
        assert one.dtype is not None
        step, *rest = layout.strides[k]
        neighbours = step == 1 and one.alignment % (packet * one.dtype.size) == 0 and all(stride % packet == 0 for stride in rest)
        if not neighbours and (step != 0 or k in full):
            return single
    return Packets(packet, 1)


def is_large(layout: Layout, width: int) -> bool:
    """Whether an index, counted in packets of so many elements, or a stride needs 64 bits, or the dims more room."""
    packets = math.prod(layout.extents) // layout.extents[0] * -(-layout.extents[0] // width)
    strides = max((abs(stride) for own in layout.strides for stride in own), default=0)
    return max(packets + _SLACK, strides) >= INDEX_LIMIT or len(layout.extents) > SMALL_DIMS


def choose_form(one: Described, strides: Ints, width: int) -> str:
    """Return what an instance is compiled to find in a parameter's place (enum Form)."""
    if width == 1:
        return "EITHER"
    return "UNIFORM" if one.array is None or strides[0] == 0 else "PACKETS"


def fill_operand(target: Any, one: Described, strides: Ints, width: int) -> None:
    """Write how an operand is reached; `strides` are along the kernel's dims."""
    if one.array is None:
        target.access = ABSENT if one.dtype is None else NUMBER
        return
    assert one.dtype is not None
    target.dtype = one.dtype.code
    target.step = strides[0]
    for dim, stride in enumerate(strides):
        target.stride[dim] = stride * width if dim == 0 else stride
    target.access = VECTOR if width > 1 and strides[0] == 1 else ARRAY


def fill_tail(parameters: Any, inner: int, width: int) -> None:
    """Write how many elements the last packet along dim 0 has."""
    parameters.last = (inner - 1) // width
    parameters.tail = inner - parameters.last * width


def fill_scalar(target: Any, one: Described) -> None:
    """Write what an option is: a number, a 0-dim array or nothing."""
    target.access = ABSENT if one.dtype is None else NUMBER if one.array is None else ARRAY
    target.dtype = one.dtype.code if one.dtype is not None else 0


def slot_format(one: Described, stored: Storage, exact: bool = False) -> str:
    """Return the `struct` code of an operand's 8 bytes: an address, or a number in the type of the arithmetic.

    With `exact`, an integer that the result's dtype does not hold is refused instead of wrapped.
    """
    if one.array is not None or one.dtype is None:
        return "Q"
    if stored.result.is_floating:
        return {"float32": "f4x", "float64": "d"}[stored.result.arithmetic]
    if not exact:
        return "q"
    return {"uint8": "B7x", "int8": "b7x", "int16": "h6x", "int32": "i4x", "int64": "q"}[stored.result.arithmetic]


def check_dims(op: Op, layout: Layout) -> None:
    """Refuse what no instance has room for."""
    ndim = len(layout.extents)
    if ndim > LARGE_DIMS:
        raise OperandError(
            message(
                op.name,
                "operands",
                expected=f"at most {LARGE_DIMS} dims that no operand walks as one",
                got=f"{ndim}",
                remedy="Make an operand contiguous.",
            )
        )


def map_plan(op: Op, shape: Ints, operands: Sequence[Described], backend: Backend) -> Launch | None:
    """Plan a forward call: the returned launch takes the address of y, then an address or a number for each operand.

    `operands` are the result, then inputs and options. None if the result has no elements.
    """
    if 0 in shape:
        return None
    result, rest = operands[0], operands[1:]
    assert result.dtype is not None
    stored = storage(rest[: len(op.inputs)], result.dtype)
    tensors = 1 + len(op.inputs)
    strides = [_layout.broadcast_strides(one.array, shape) if one.array else (0,) * len(shape) for one in operands[:tensors]]
    layout = _layout.collapse(shape, strides, [k for k, one in enumerate(operands[:tensors]) if one.array])
    arrays = [(k, one) for k, one in enumerate(operands[:tensors]) if one.array]
    width, items = choose_packets(layout, arrays, [0, 1], stored)
    forms = tuple(choose_form(one, own, width) for one, own in zip(operands[1:tensors], layout.strides[1:]))
    extents = (-(-layout.extents[0] // width), *layout.extents[1:])
    packets = math.prod(extents)
    check_dims(op, layout)
    large = is_large(layout, width)
    variant = Variant(
        op, "forward", stored.x, stored.parameter, stored.result.stored, stored.result.arithmetic, width, items, forms, (), large
    )
    parameters = map_struct(tensors, len(op.options), large)()
    for k, one in enumerate(operands[:tensors]):
        fill_operand(parameters.operand[k], one, layout.strides[k], width)
    for k, one in enumerate(operands[tensors:]):
        fill_scalar(parameters.scalar[k], one)
    fill_dims(parameters.dims, extents)
    parameters.packets, parameters.ndim = packets, len(extents)
    fill_tail(parameters, layout.extents[0], width)
    slots = "".join(slot_format(one, stored, exact=k >= tensors) for k, one in enumerate(operands))
    return Launch(backend.load(variant), (-(-packets // (BLOCK * items)), 1), bytes(parameters), slots)
