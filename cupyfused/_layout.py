"""Arithmetic on shapes and strides: broadcasting, the strides of a result, and how a call falls into loops.

Everything here is a pure function of integers; no array library is imported. Strides count elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "Layout",
    "Strided",
    "broadcast_shapes",
    "broadcast_strides",
    "collapse",
    "contiguous_strides",
    "divider",
    "is_dense",
    "like_strides",
    "overlaps_itself",
    "result_strides",
]

Ints = tuple[int, ...]


class Strided(NamedTuple):
    """The geometry of one array."""

    shape: Ints
    strides: Ints


def broadcast_shapes(shapes: Sequence[Ints]) -> Ints | None:
    """Return the common shape of operands that broadcast together, None where they do not.

    Examples
    --------
    >>> broadcast_shapes([(4, 1, 6), (5, 1)]), broadcast_shapes([(2, 3), (2,)])
    ((4, 5, 6), None)
    """
    ndim = max(map(len, shapes))
    result = [1] * ndim
    for shape in shapes:
        for dim, extent in enumerate(shape, ndim - len(shape)):
            if extent != 1:
                if result[dim] not in (1, extent):
                    return None
                result[dim] = extent
    return tuple(result)


def broadcast_strides(operand: Strided, shape: Ints) -> Ints:
    """Return the strides that walk `operand` over `shape`: 0 along the dims that it does not have."""
    missing = len(shape) - len(operand.shape)
    own = (
        0 if extent == 1 and whole != 1 else stride
        for extent, stride, whole in zip(operand.shape, operand.strides, shape[missing:])
    )
    return (0,) * missing + tuple(own)


def contiguous_strides(shape: Ints, order: Sequence[int] | None = None) -> Ints:
    """Return dense strides, the last dim innermost, or the dims nested as `order` lists them, innermost first."""
    strides = [0] * len(shape)
    step = 1
    for dim in order if order is not None else reversed(range(len(shape))):
        strides[dim] = step
        step *= shape[dim] if order is not None else max(shape[dim], 1)
    return tuple(strides)


def is_contiguous(array: Strided, order: Sequence[int] | None = None) -> bool:
    """Whether the elements lie without gaps in this nesting of the dims; the strides of dims of extent 1 do not count."""
    if 0 in array.shape:
        return True
    step = 1
    for dim in order if order is not None else reversed(range(len(array.shape))):
        if array.shape[dim] != 1 and array.strides[dim] != step:
            return False
        step *= array.shape[dim]
    return True


def is_dense(array: Strided) -> bool:
    """Whether the elements fill one stretch of memory, each place once, in whatever order of dims."""
    dims = [dim for dim, extent in enumerate(array.shape) if extent != 1]
    return is_contiguous(array, sorted(dims, key=lambda dim: array.strides[dim]))


def overlaps_itself(array: Strided) -> bool:
    """Whether two indices may lead to one place in memory; sure to be False for every slice and permutation of a dense array."""
    dims = sorted((abs(stride), extent) for extent, stride in zip(array.shape, array.strides) if extent > 1)
    reach = 0
    for stride, extent in dims:
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


_CHANNELS_LAST = (1, 3, 2, 0)


def result_strides(shape: Ints, operands: Sequence[Strided]) -> Ints:
    """Return the strides of the fresh result of one elementwise operation, as PyTorch's TensorIterator chooses them."""
    if all(operand.shape == shape for operand in operands):
        if all(map(is_contiguous, operands)):
            return contiguous_strides(shape)
        if len(shape) == 4 and all(is_contiguous(operand, _CHANNELS_LAST) for operand in operands):
            return contiguous_strides(shape, _CHANNELS_LAST)
        if all(operand.strides == operands[0].strides and is_dense(operand) for operand in operands):
            return operands[0].strides
    order = _order(shape, [broadcast_strides(operand, shape) for operand in operands])
    if order == list(reversed(range(len(shape)))):
        return contiguous_strides(shape)
    return contiguous_strides(shape, order)


def _order(shape: Ints, strides: Sequence[Ints]) -> list[int]:
    """Sort the dims, innermost first: by the first operand that tells two dims apart; a stride of 0 tells nothing."""

    def compare(a: int, b: int) -> int:
        for own in strides:
            if own[a] == 0 or own[b] == 0:
                continue
            if own[a] != own[b]:
                return -1 if abs(own[a]) < abs(own[b]) else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for end in range(1, len(order)):  # an insertion sort, since "tells nothing" is no ordering that sorted() could use
        place = end
        for other in reversed(range(end)):
            verdict = compare(order[other], order[place])
            if verdict > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif verdict < 0:
                break
    return order


def like_strides(array: Strided) -> Ints:
    """Return the strides that `torch.empty_like` gives: the array's own if it is dense, else dense ones in the same order."""
    if is_dense(array):
        return array.strides
    return result_strides(array.shape, [array])


@dataclass(frozen=True)
class Layout:
    """A call's dims after reordering and merging, innermost first, with each operand's strides along them."""

    extents: Ints
    strides: tuple[Ints, ...]  # one tuple an operand
    dims: Ints  # for each, the outermost of the original dims that it is made of


def collapse(shape: Ints, strides: Sequence[Ints], order_by: Sequence[int], apart: Sequence[Ints] = ()) -> Layout:
    """Drop the dims of extent 1, sort the others and merge those that every operand walks as one.

    Parameters
    ----------
    shape
        The broadcast shape.
    strides
        Each operand's strides over `shape`.
    order_by
        The operands whose strides decide what is innermost, in order of their say.
    apart
        Marks along the dims; two dims with different marks stay apart (which gradients are summed along them).
    """
    order = [dim for dim in _order(shape, [strides[k] for k in order_by]) if shape[dim] != 1]
    extents: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    dims: list[int] = []
    for dim in order:
        fits = extents and all(own[dim] == group[-1] * extents[-1] for own, group in zip(strides, merged))
        if fits and all(marks[dim] == marks[dims[-1]] for marks in apart):
            extents[-1] *= shape[dim]
            dims[-1] = dim
        else:
            extents.append(shape[dim])
            for own, group in zip(strides, merged):
                group.append(own[dim])
            dims.append(dim)
    if not extents:
        return Layout((1,), tuple((0,) for _ in strides), ())
    return Layout(tuple(extents), tuple(tuple(group) for group in merged), tuple(dims))


def divider(extent: int) -> tuple[int, int]:
    """Return (magic, shift) such that `n * magic >> shift == n // extent` for every 0 <= n < 2**31, for 1 <= extent < 2**31.

    Multiplying by the rounded-up reciprocal (Granlund and Montgomery, 1994): with s = ceil(log2(extent)) the magic number
    ceil(2**(31 + s) / extent) fits 32 bits, and what rounding it up adds stays below 1 / extent.
    """
    shift = 31 + (extent - 1).bit_length()
    return -(-(1 << shift) // extent), shift
