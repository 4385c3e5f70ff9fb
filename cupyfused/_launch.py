"""Device guard, argument packing, launch. The only place that touches the driver.

One kernel takes one struct by value. Its bytes are laid out once, when a plan is made; a call writes the addresses and numbers
at its start and hands the buffer to `cuLaunchKernel` through CuPy's driver binding (3.3 us on an H200 host; a RawKernel call
with as many arguments 6.0). Where that binding is missing, RawKernel takes the same bytes as a NumPy array by value.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

from . import _kernel
from ._source import BLOCK, Variant
from .errors import CudaError

__all__ = ["Launch", "cuda_launcher", "multiprocessors"]

_PARAMETER_POINTER, _PARAMETER_SIZE, _PARAMETER_END = 1, 2, 0  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END of cuda.h

Launcher = Callable[[tuple[int, int], "Buffer", int], None]


class Buffer:
    """The bytes of one kernel's parameters, with the table by which the driver finds them."""

    def __init__(self, parameters: bytes):
        self.bytes = bytearray(parameters)
        self.size = ctypes.c_size_t(len(parameters))
        self._view = (ctypes.c_char * len(parameters)).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._view)
        self._table = (ctypes.c_void_p * 5)(
            _PARAMETER_POINTER, self.address, _PARAMETER_SIZE, ctypes.addressof(self.size), _PARAMETER_END
        )
        self.table = ctypes.addressof(self._table)


class Launch:
    """One kernel of a plan: everything but the addresses and numbers of a call is fixed.

    The launch lets other threads run, so a buffer belongs to one call at a time: it is taken from a list and put back, both of
    which are atomic.
    """

    def __init__(self, launcher: Launcher, grid: tuple[int, int], parameters: bytes, slots: str):
        self._launcher = launcher
        self._grid = grid
        self._parameters = parameters
        self._pack_into = struct.Struct("<" + slots).pack_into
        self._free: list[Buffer] = []

    def __call__(self, stream: int, *slots: int | float) -> None:
        """Launch with these addresses and numbers; `struct.error` or OverflowError if a number does not fit its slot."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = Buffer(self._parameters)
        self._pack_into(buffer.bytes, 0, *slots)
        self._launcher(self._grid, buffer, stream)
        self._free.append(buffer)


# ---- CUDA ---------------------------------------------------------------------------------------------------------------


@functools.cache
def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a device has."""
    cupy = _kernel.import_cupy()
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@functools.cache
def _driver_launch() -> Callable[..., None] | None:
    """CuPy's binding of cuLaunchKernel: a private name, so it is looked for, and RawKernel does the same without it."""
    if os.environ.get("CUPYFUSED_LAUNCH") == "rawkernel":
        return None
    _kernel.import_cupy()
    try:
        launch: Callable[..., None] = importlib.import_module("cupy_backends.cuda.api.driver").launchKernel
        return launch
    except (ImportError, AttributeError):
        return None


class _Thread(threading.local):
    """The devices that a thread has a CUDA context for."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def cuda_launcher(variant: Variant, device: int) -> Launcher:
    """Load a variant on a device and return what launches it there, whatever device is current in the calling thread."""
    cupy = _kernel.import_cupy()
    get_device, set_device = cupy.cuda.runtime.getDevice, cupy.cuda.runtime.setDevice
    name = variant.kernel_name
    with cupy.cuda.Device(device):
        raw = _kernel.load(variant, device)
        handle = getattr(getattr(raw, "kernel", None), "ptr", None)  # of the current device
    block, debug = BLOCK, os.environ.get("CUPYFUSED_DEBUG") == "1"
    driver_launch = _driver_launch()

    def launch(grid: tuple[int, int], buffer: Buffer, stream: int) -> None:
        current, seen = get_device(), _thread.devices
        # A thread of autograd has no CUDA context until a device is set in it, whatever getDevice says.
        switch = current != device or device not in seen
        if switch:
            set_device(device)
            seen.add(device)
        try:
            if driver_launch is not None and handle is not None:
                driver_launch(handle, grid[0], grid[1], 1, block, 1, 1, 0, stream, 0, buffer.table)
            else:
                _launch_by_raw_kernel(cupy, raw, grid, buffer, stream)
            if debug:
                cupy.cuda.runtime.streamSynchronize(stream)
        except Exception as error:
            raise CudaError(
                f"{name}: the launch of {grid} blocks of {BLOCK} threads on cuda:{device} failed: {error}. "
                "Kernels launched before may be at fault; CUPYFUSED_DEBUG=1 waits for each one and names it."
            ) from error
        finally:
            if switch and current != device:
                set_device(current)

    return launch


def _launch_by_raw_kernel(cupy: Any, raw: Any, grid: tuple[int, int], buffer: Buffer, stream: int) -> None:
    numpy = importlib.import_module("numpy")
    with cupy.cuda.ExternalStream(stream):
        # An array of one element goes by value; its dtype is the whole struct.
        struct_by_value = numpy.frombuffer(bytes(buffer.bytes), dtype=numpy.dtype((numpy.void, len(buffer.bytes))))
        raw(grid, (BLOCK,), (struct_by_value,))
