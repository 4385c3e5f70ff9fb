"""What is measured: layouts and sizes as data, the operands that they describe, and the bytes that must move for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BOUNDS", "FEW_LAYOUTS", "FLAT", "LAYOUTS", "Layout", "bytes_moved", "operands"]

BOUNDS = (0.0, 1.0)
_MARGIN = 64  # columns on each side of a crop

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """Shapes of x, scale and bias, and how x lies in memory.

    A length of -1 is what the elements leave for it in x, and in a parameter the length of x's own dim.
    """

    name: str
    x: Shape
    scale: Shape
    bias: Shape
    memory: str = "contiguous"


FLAT = Layout("bias of full size, 0-dim scale", (-1,), (), (-1,))
NCHW = Layout("NCHW (N, 256, 64, 64), per channel", (-1, 256, 64, 64), (256, 1, 1), (256, 1, 1))
FEW_LAYOUTS = (FLAT, NCHW)

LAYOUTS = (
    FLAT,
    Layout("0-dim scale and bias", (-1,), (), ()),
    NCHW,
    Layout("channels_last, per channel", (-1, 256, 64, 64), (256, 1, 1), (256, 1, 1), "channels last"),
    Layout("last dim (N, 4096)", (-1, 4096), (4096,), (4096,)),
    Layout("AdaLN (16, N, 2048), (16, 1, 2048)", (16, -1, 2048), (16, 1, 2048), (16, 1, 2048)),
    Layout("scale (N, 1), bias (4096)", (-1, 4096), (-1, 1), (4096,)),
    Layout("crop of rows, 0-dim scale and bias", (-1, 4096), (), (), "crop"),
    Layout("transposed x, last dim", (-1, 8192), (8192,), (8192,), "transposed"),
    Layout("unaligned x, 0-dim scale and bias", (-1,), (), (), "unaligned"),
    Layout("odd width (N, 1023), last dim", (-1, 1023), (1023,), (1023,)),
    Layout("odd width (N, 1277), last dim", (-1, 1277), (1277,), (1277,)),
    Layout("odd width (N, 4097), last dim", (-1, 4097), (4097,), (4097,)),
)


def operands(layout: Layout, elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Make x, scale and bias of a layout, of fresh random numbers; x has about `elements` elements."""

    def random(shape: Shape) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    known = math.prod(length for length in layout.x if length > 0)
    shape = tuple(max(elements // known, 1) if length < 0 else length for length in layout.x)
    x = _MEMORY[layout.memory](random, shape)
    return [x, *(random(_filled(parameter, shape)) for parameter in (layout.scale, layout.bias))]


def _filled(parameter: Shape, x: Shape) -> Shape:
    return tuple(own if length < 0 else length for length, own in zip(parameter, x[len(x) - len(parameter) :]))


def _unaligned(random: Callable[[Shape], Tensor], shape: Shape) -> Tensor:
    return random((math.prod(shape) + 1,))[1:].view(shape)


def _crop(random: Callable[[Shape], Tensor], shape: Shape) -> Tensor:
    return random((*shape[:-1], shape[-1] + 2 * _MARGIN))[..., _MARGIN:-_MARGIN]


_MEMORY: dict[str, Callable[[Callable[[Shape], Tensor], Shape], Tensor]] = {
    "contiguous": lambda random, shape: random(shape),
    "channels last": lambda random, shape: random(shape).contiguous(memory_format=torch.channels_last),
    "transposed": lambda random, shape: random(shape[::-1]).t(),
    "crop": _crop,
    "unaligned": _unaligned,
}


def bytes_moved(operands: Sequence[Tensor], y: Tensor, gradients: bool) -> int:
    """Return the bytes that must move: inputs in, result out; for gradients grad_out and inputs in and each gradient out too."""
    read, result = sum(one.numel() * one.element_size() for one in operands), y.numel() * y.element_size()
    return 3 * read + 2 * result if gradients else read + result
