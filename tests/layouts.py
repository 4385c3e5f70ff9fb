"""Shapes that broadcast and layouts that a kernel may trip over: the data of every contract test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["EMPTY", "LAYOUTS", "SHAPES", "SUMS", "WIDTHS", "Shapes", "draw", "lay", "shape_id"]

Shapes = tuple[tuple[int, ...], ...]  # of x and the parameters

# Extents are prime and differ, so that no two dims can be taken for each other; 8 and 16 make whole 16-byte packets.
SHAPES: tuple[Shapes, ...] = (
    ((), (), ()),
    ((1,), (1,), (1,)),
    ((5, 7), (5, 7), (5, 7)),
    ((3, 16), (3, 16), (3, 16)),
    ((3, 5, 7), (), ()),
    ((2, 3, 5, 7), (3, 1, 1), (3, 1, 1)),
    ((2, 3, 4, 16), (3, 1, 1), (3, 1, 1)),
    ((5, 7), (7,), (7,)),
    ((5, 16), (16,), (16,)),
    ((3, 5, 7), (3, 1, 7), (3, 1, 7)),
    ((4, 5, 8), (4, 1, 8), (4, 1, 8)),
    ((5, 7), (5, 1), (7,)),
    ((6, 16), (16,), (6, 1)),
    ((), (5, 7), (7,)),
    ((7,), (5, 7), (5, 1)),
    ((16,), (5, 1), (5, 16)),
    ((4, 1, 6), (5, 1), (4, 5, 6)),
    ((3,), (7, 3), ()),
    ((2, 1, 3, 1, 5), (1, 3, 1, 1), (2, 1, 1, 1, 5)),
    ((2, 3, 5, 7, 11), (11,), (5, 1, 1)),
    ((2, 1, 2, 1, 3, 1, 2, 1, 2, 1), (1, 2, 1, 3, 1, 2, 1, 2, 1, 2), (2,)),  # ten dims that do not merge
)
EMPTY: tuple[Shapes, ...] = (
    ((0,), (1,), ()),
    ((0, 8), (8,), (8,)),
    ((4, 0, 5), (5,), (4, 1, 1)),
    ((3, 1), (1, 0), ()),
)
# Enough elements that a sum is split over blocks, and an extent that leaves the last of them unfilled.
SUMS: tuple[Shapes, ...] = (
    ((40_009,), (), ()),
    ((7, 3, 1_009), (3, 1), (3, 1)),
    ((5, 4, 2_048), (4, 1), (4, 1)),
    ((3_001, 16), (16,), (16,)),
    ((3_001, 7), (7,), (7,)),
    ((307, 35), (307, 1), (35,)),
    ((300, 136), (136,), (300, 1)),
    ((5, 601, 16), (5, 1, 16), (5, 1, 1)),
    ((16,), (3_001, 1), (3_001, 16)),
)
WIDTHS = (1, 2, 3, 5, 7, 31, 32, 33, 127, 255, 257, 1023, 1025, 4097)


def shape_id(shapes: Shapes) -> str:
    """Name a case: x4x1x6-5x1-4x5x6."""
    return "-".join("x".join(map(str, shape)) or "0dim" for shape in shapes)


def draw(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return random values of order one, or small integers; never a constant."""
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)
    if dtype is torch.bool:
        return (torch.rand(tuple(shape), generator=generator) > 0.4).to(device)
    low = 1 if dtype is torch.uint8 else -9
    return torch.randint(low, 10, tuple(shape), generator=generator).to(device=device, dtype=dtype)


# ---- layouts ------------------------------------------------------------------------------------------------------------


def _gap(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory around a view: NaN, or all bits set, so that an element read from there shows."""
    return torch.full(
        tuple(shape),
        float("nan") if like.is_floating_point() else -1 if like.dtype.is_signed else 1,
        dtype=like.dtype,
        device=like.device,
    )


def _contiguous(values: Tensor) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format)


def _channels_last(values: Tensor) -> Tensor:
    return values.contiguous(memory_format=torch.channels_last if values.ndim == 4 else torch.channels_last_3d)


def _transposed(values: Tensor) -> Tensor:
    return _contiguous(values.transpose(-1, -2)).transpose(-1, -2)


def _reversed_dims(values: Tensor) -> Tensor:
    order = tuple(reversed(range(values.ndim)))
    return _contiguous(values.permute(order)).permute(order)


def _sliced(values: Tensor) -> Tensor:
    last = values.shape[-1]
    view = _gap(values, (*values.shape[:-1], 2 * last + 3))[..., 3 : 3 + 2 * last : 2]
    return view.copy_(values)


def _cropped(values: Tensor) -> Tensor:
    last = values.shape[-1]
    view = _gap(values, (*values.shape[:-1], last + 5))[..., 2 : 2 + last]
    return view.copy_(values)


def _pitched(values: Tensor) -> Tensor:
    """Rows longer than they are read, each still aligned for 16-byte loads."""
    last = values.shape[-1]
    view = _gap(values, (*values.shape[:-1], (last // 16 + 2) * 16))[..., :last]
    return view.copy_(values)


def _unaligned(values: Tensor) -> Tensor:
    return _gap(values, (values.numel() + 1,))[1:].view(values.shape).copy_(values)


def _expanded(values: Tensor) -> Tensor:
    return _contiguous(values[:1]).expand(values.shape)


def _expanded_last(values: Tensor) -> Tensor:
    return _contiguous(values[..., :1]).expand(values.shape)


def _overlapping(values: Tensor) -> Tensor:
    places = 1 + sum(extent - 1 for extent in values.shape)
    return _contiguous(values.flatten()[:places]).as_strided(values.shape, (1,) * values.ndim)


# Each returns a view with the shape of the values it is given, and those values unless the layout itself repeats some.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Sequence[int]]] = {
    "contiguous": (_contiguous, range(65)),
    "channels_last": (_channels_last, (4,)),
    "channels_last_3d": (_channels_last, (5,)),
    "transposed": (_transposed, range(2, 65)),
    "reversed dims": (_reversed_dims, range(2, 65)),
    "sliced": (_sliced, range(1, 65)),
    "cropped": (_cropped, range(1, 65)),
    "pitched": (_pitched, range(2, 65)),
    "unaligned": (_unaligned, range(65)),
    "expanded": (_expanded, range(1, 65)),
    "expanded last dim": (_expanded_last, range(1, 65)),
    "overlapping": (_overlapping, range(1, 65)),
}


def lay(values: Tensor, layout: str) -> Tensor:
    """Return a tensor of the shape of `values` in a layout; contiguous where it has too few or too many dims for that."""
    function, dims = LAYOUTS[layout]
    return (function if values.ndim in dims and values.numel() else _contiguous)(values)


def flipped(array: Any) -> Any:
    """Return a NumPy or CuPy view with negative strides along every other dim, the last one included."""
    return array[tuple(slice(None, None, -1 if dim % 2 else 1) for dim in reversed(range(1, array.ndim + 1)))]
