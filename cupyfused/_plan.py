"""Plans: everything about a call that can be decided once for a signature.

A plan knows its kernels, grids and parameter bytes; running it takes a stream, the addresses of the call and its numbers.
Nothing here knows an array library: operands come as `Described`, memory as addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ._dtypes import BY_NAME, Dtype
from ._launch import Launcher
from ._layout import Ints, Layout, Strided
from ._parameters import INDEX_LIMIT
from ._source import LARGE_DIMS, SMALL_DIMS, Variant
from .errors import OperandError, message

if TYPE_CHECKING:
    from ._op import Op

__all__ = [
    "Backend",
    "Described",
    "Packets",
    "Storage",
    "X",
    "check_dims",
    "choose_forms",
    "choose_packets",
    "fill_operand",
    "fill_scalar",
    "is_large",
    "slot_format",
    "split_tail",
    "storage",
]

ABSENT, NUMBER, ARRAY, VECTOR = range(4)  # enum Access of cuda_src/common.cuh
X = 1  # its place among the tensors of a layout: the first input, after the result or its gradient
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
    general: bool  # by the instance that keeps everything open, for what is rare
    is_shifted: bool = False  # those of x begin anywhere


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

    Dim 0 must be made of whole packets, or be all there is and more than one; each of `arrays`, by its place in the layout, must
    have neighbours there, aligned in every row, or one element for all of them, which those in `full` cannot have. x, which is at
    place 1, need not be aligned.
    """
    packet, inner = stored.packet, layout.extents[0]
    known = stored.x != "any_dtype"
    fits = packet > 1 and inner >= packet and (inner % packet == 0 or len(layout.extents) == 1)
    unaligned = [k for k, one in arrays if not _has_packets(layout.strides[k], one, packet, k in full)]
    fits = fits and (not unaligned or (unaligned == [X] and _has_elements(layout.strides[X], dict(arrays)[X])))
    if known and fits and not is_large(layout, packet):
        return Packets(packet, 2 if packet == 8 else 1, False, bool(unaligned))
    moves = all(layout.strides[k][0] for k, _ in arrays if k in full)
    general = not (known and moves and stored.result.is_floating) or is_large(layout, 1)
    return Packets(1, min(packet, MAX_ITEMS), general)


def _has_packets(strides: Ints, one: Described, packet: int, is_full: bool) -> bool:
    assert one.dtype is not None
    step, *rest = strides
    neighbours = step == 1 and one.alignment % (packet * one.dtype.size) == 0 and all(stride % packet == 0 for stride in rest)
    return neighbours or (step == 0 and not is_full)


def _has_elements(strides: Ints, one: Described) -> bool:
    """Whether packets can be put together from two neighbours: those are cut between elements, not inside one."""
    assert one.dtype is not None
    return strides[0] == 1 and one.alignment % one.dtype.size == 0


def split_tail(extents: Ints, width: int) -> tuple[Ints, int]:
    """Return the extents counted in packets along dim 0, and the elements after the last packet."""
    return (extents[0] // width, *extents[1:]), extents[0] % width


def is_large(layout: Layout, width: int) -> bool:
    """Whether an index, counted in packets of so many elements, or a stride needs 64 bits, or the dims more room."""
    packets = math.prod(layout.extents) // layout.extents[0] * -(-layout.extents[0] // width)
    # Along dim 1 forward steps from group to group of items.
    reach = [abs(stride) * (MAX_ITEMS if dim == 1 else 1) for own in layout.strides for dim, stride in enumerate(own)]
    return max(packets + _SLACK, *reach) >= INDEX_LIMIT or len(layout.extents) > SMALL_DIMS


def choose_forms(layout: Layout, inputs: Sequence[Described], packets: Packets) -> tuple[str, ...]:
    """Return what an instance is compiled to find in each input's place (enum Form)."""
    if packets.general:
        return ("EITHER",) * len(inputs)
    is_uniform = [one.array is None or own[0] == 0 for one, own in zip(inputs, layout.strides[X:])]
    forms = ["UNIFORM" if uniform else "PACKETS" for uniform in is_uniform]
    return ("SHIFTED" if packets.is_shifted else forms[0], *forms[1:])


def fill_operand(parameters: Any, k: int, one: Described, strides: Ints, width: int) -> None:
    """Write how tensor `k` is reached; `strides` are along the kernel's dims, of which dim 0 counts `width` elements at once."""
    target = parameters.operand[k]
    if one.array is None:
        target.access = ABSENT if one.dtype is None else NUMBER
        return
    assert one.dtype is not None
    target.dtype = one.dtype.code
    target.step = strides[0]
    for place, (dim, stride) in enumerate(zip(parameters.dim, strides)):
        dim.stride[k] = stride * width if place == 0 else stride
    target.access = VECTOR if width > 1 and strides[0] == 1 else ARRAY


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
