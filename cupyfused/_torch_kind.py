"""The array kind torch.Tensor: its door, its allocator, its current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from . import _dlpack
from ._arrays import Device
from ._layout import Strided
from ._plan import Described
from ._promotion import DTYPES

__all__ = ["TORCH", "TORCH_UNREAD", "TorchKind", "raw_stream"]

_DEVICE_TYPES: dict[str, Any] = {"cpu": _dlpack.CPU, "cuda": _dlpack.CUDA}


class TorchKind:
    """torch.Tensor."""

    name = "torch.Tensor"

    def __init__(self, reads_memory: bool):
        self._reads_memory = reads_memory

    def refuses(self, array: Tensor) -> str | None:
        if array.is_nested:
            return "a nested tensor"
        if array.layout != torch.strided:
            return f"a tensor of layout {array.layout}"
        if array.is_quantized:
            return "a quantised tensor"
        return None if array.dtype in DTYPES else str(array.dtype)

    def read(self, array: Tensor) -> _dlpack.Descriptor:
        """Read the DLPack descriptor, or what the tensor says of itself where no kernel will touch its memory."""
        device = (_DEVICE_TYPES.get(array.device.type, array.device.type), array.device.index or 0)
        shape, strides = tuple(array.shape), array.stride()
        if not self._reads_memory or array.device.type not in _DEVICE_TYPES:
            return _dlpack.Descriptor(0, shape, strides, DTYPES[array.dtype], device)
        told = _dlpack.read(to_dlpack(array.detach()))  # detached: an export of a tensor that requires grad is refused
        # The export rewrites the strides of dims of extent 1, in 2.6 of 0 too, on which the strides of results depend.
        kept = tuple(own if extent < 2 else stride for own, stride, extent in zip(strides, told.strides, told.shape))
        return told._replace(strides=kept)

    def describe(self, array: Tensor) -> Described:
        """Return what a plan knows of a tensor."""
        told = self.read(array)
        return Described(DTYPES[array.dtype], Strided(told.shape, told.strides), told.address % 16)

    def address(self, array: Tensor) -> int:
        return array.data_ptr()

    def stream(self, device: Device) -> int:
        return raw_stream(device[1])() if device[0] == _dlpack.CUDA else 0


TORCH, TORCH_UNREAD = TorchKind(reads_memory=True), TorchKind(reads_memory=False)


@functools.cache
def raw_stream(device: int) -> Callable[[], int]:
    """Return what tells PyTorch's current stream of the calling thread. By the public name it takes 4 us."""
    private: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if private is not None:
        return functools.partial(private, device)
    return lambda: torch.cuda.current_stream(device).cuda_stream
