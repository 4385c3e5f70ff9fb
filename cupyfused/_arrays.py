"""The door: what kind of array is this, and what does a call need to know of it.

An array kind is a library behind one small interface. NumPy and CuPy are here, PyTorch in `_torch`; any other producer of DLPack
comes in as a NumPy or CuPy array over the same memory and gets its result back through its own `from_dlpack`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from . import _dlpack, _kernel, _launch
from ._dtypes import BY_NAME, Dtype, Rank, Typed, number_dtype
from ._layout import Ints, Strided
from ._plan import Backend, Described
from .errors import CudaError, CupyfusedError, DtypeError, OperandError, message

if TYPE_CHECKING:
    from ._op import Op

__all__ = [
    "CPU",
    "ArrayKind",
    "CupyKind",
    "Device",
    "Kind",
    "NumpyKind",
    "Operand",
    "as_number",
    "cuda_backend",
    "device_name",
    "kind_of",
    "library_dtype",
    "open_door",
]

CPU = (_dlpack.CPU, 0)
Device = tuple[Any, int]  # DLPack's number of the device type, or the library's name for one that has none; and the index


def device_name(device: Device | None) -> str:
    """Return "cpu" or "cuda:0"."""
    if device is None or device[0] == _dlpack.CPU:
        return "cpu"
    return f"cuda:{device[1]}" if device[0] == _dlpack.CUDA else f"{device[0]}:{device[1]}"


class Kind(Protocol):
    """What the door asks of an array library."""

    name: str

    def refuses(self, array: Any) -> str | None:
        """Return what an array is if kernels cannot store it, None if they can."""

    def read(self, array: Any) -> _dlpack.Descriptor:
        """Return where an array lies and what it holds."""


class ArrayKind(Kind, Protocol):
    """What a call asks of NumPy and CuPy besides."""

    @property
    def array(self) -> type:
        """The library's own class of arrays."""

    def place(self, array: Any) -> tuple[int, int]:
        """Return the address of an array's first element, and the number of the device that it is on."""

    def allocator(self, shape: Ints, strides: Ints, dtype: Dtype, device: Device) -> Callable[[], Any]:
        """Return what allocates an array of this kind with the library's own allocator; the strides are dense."""

    def stream(self, device: Device) -> int:
        """Return the library's current stream on a device, in the calling thread."""


class Operand(NamedTuple):
    """One argument, opened."""

    value: Any
    described: Described
    typed: Typed | None  # None: an option left out
    device: Device | None  # None: a number
    address: int = 0


def _dense_allocator(namespace: Any, shape: Ints, strides: Ints, dtype: str) -> Callable[[], Any]:
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim]), reverse=True)
    nested = functools.partial(namespace.empty, tuple(shape[dim] for dim in order), library_dtype(dtype))
    if order == list(range(len(shape))):
        return nested
    axes = tuple(np.argsort(order).tolist())
    return lambda: nested().transpose(axes)


def library_dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    return np.dtype(importlib.import_module("ml_dtypes").bfloat16)


def _refused_dtype(array: Any) -> str | None:
    if array.dtype.name not in BY_NAME or not array.dtype.isnative:
        return f"{array.dtype}"
    if any(stride % array.dtype.itemsize for stride in array.strides):  # a field of records
        return f"one whose strides, {array.strides} bytes, are no whole elements"
    return None


class NumpyKind:
    """numpy.ndarray."""

    name = "numpy.ndarray"

    @property
    def array(self) -> type:
        return np.ndarray

    def refuses(self, array: Any) -> str | None:
        if hasattr(array, "mask"):  # numpy.ma is loaded when it is first named, which no other call needs
            return "a masked array"
        return _refused_dtype(array)

    def read(self, array: Any) -> _dlpack.Descriptor:
        size = array.dtype.itemsize
        strides = tuple(stride // size for stride in array.strides) if size else (0,) * array.ndim
        return _dlpack.Descriptor(array.ctypes.data, array.shape, strides, BY_NAME[array.dtype.name], CPU)

    def place(self, array: Any) -> tuple[int, int]:
        return array.__array_interface__["data"][0], 0  # `ctypes.data` takes three times as long

    def allocator(self, shape: Ints, strides: Ints, dtype: Dtype, device: Device) -> Callable[[], Any]:
        return _dense_allocator(np, shape, strides, dtype.name)

    def stream(self, device: Device) -> int:
        return 0


class CupyKind:
    """cupy.ndarray."""

    name = "cupy.ndarray"

    @functools.cached_property
    def array(self) -> type:
        return _kernel.import_cupy().ndarray  # type: ignore[no-any-return]

    def refuses(self, array: Any) -> str | None:
        return _refused_dtype(array)

    def read(self, array: Any) -> _dlpack.Descriptor:
        with array.device:  # an export from another device than the current one is refused
            return _dlpack.read(array.__dlpack__(stream=-1))  # -1: no synchronisation, the launch is on the array's own stream

    def place(self, array: Any) -> tuple[int, int]:
        data = array.data
        return data.ptr, data.device_id

    def allocator(self, shape: Ints, strides: Ints, dtype: Dtype, device: Device) -> Callable[[], Any]:
        cupy = _kernel.import_cupy()
        allocate = _dense_allocator(cupy, shape, strides, dtype.name)
        current, index = cupy.cuda.runtime.getDevice, device[1]

        def on_device() -> Any:
            if current() == index:  # entering a device takes a microsecond
                return allocate()
            with cupy.cuda.Device(index):
                return allocate()

        return on_device

    @functools.cached_property
    def _current_stream(self) -> Callable[[int], Any]:
        return _kernel.import_cupy().cuda.get_current_stream  # type: ignore[no-any-return]

    def stream(self, device: Device) -> int:
        return self._current_stream(device[1]).ptr  # type: ignore[no-any-return]


NUMPY, CUPY = NumpyKind(), CupyKind()


@functools.cache
def cuda_backend(device: int) -> Backend:
    """Return the backend of a CUDA device; it imports CuPy, so the error that CuPy is missing comes from here."""
    return Backend("cuda", lambda variant: _launch.cuda_launcher(variant, device), _launch.multiprocessors(device))


@functools.cache
def _kind_of_type(kind: type) -> Kind | None:
    if issubclass(kind, np.ndarray):
        return NUMPY
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and "torch" in roots and issubclass(kind, torch.Tensor):
        return importlib.import_module("cupyfused._torch_kind").TORCH  # type: ignore[no-any-return]
    if cupy is not None and "cupy" in roots and issubclass(kind, cupy.ndarray):
        return CUPY
    return None


def kind_of(value: Any) -> Kind | None:
    """Return the kind of an array, None for anything else (numbers and other DLPack producers included)."""
    kind: type = type(value)
    return _kind_of_type(kind)


def as_number(value: Any) -> bool | int | float | None:
    """Return a Python number for what counts as one: a number, or a NumPy value without dims; None for anything else."""
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, (bool, int, float)) else None


def open_door(op: Op, kind: Kind, name: str, value: Any, default_float: Dtype, optional: bool) -> Operand:
    """Open one argument that stands beside an `x` of `kind`."""
    if value is None and optional:
        return Operand(None, Described(), None, None)
    number = as_number(value) if name not in (op.inputs[0], "out") else None
    if number is not None:
        dtype = number_dtype(number, default_float)
        return Operand(number, Described(dtype), Typed(dtype, Rank.NUMBER), None)
    own = kind_of(value)
    if own is None or own.name != kind.name:
        raise _not_an_operand(op, kind, name, value, own, optional)
    got = kind.refuses(value)
    if got is not None:
        expected = f"a strided array of one of the dtypes {', '.join(BY_NAME)}"
        raise DtypeError(message(op.name, name, expected=expected, got=got, remedy="Convert it first."))
    told = kind.read(value)
    assert told.dtype is not None
    if optional and told.shape:
        raise OperandError(
            message(
                op.name,
                name,
                expected="a number, None or a 0-dim array",
                got=f"an array of shape {told.shape}",
                remedy="Pass one element of it.",
            )
        )
    typed = Typed(told.dtype, Rank.ARRAY if told.shape else Rank.ZERO_DIM)
    described = Described(told.dtype, Strided(told.shape, told.strides), told.address % 16)
    return Operand(value, described, typed, told.device, told.address)


def _not_an_operand(op: Op, kind: Kind, name: str, value: Any, own: Kind | None, optional: bool) -> CupyfusedError:
    got = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if own is not None:
        remedy = "Convert one of them; arrays of different libraries are not mixed, so that no copy between them is hidden."
        return DtypeError(
            message(op.name, name, expected=f"a {kind.name} like {op.inputs[0]}, or a number", got=f"a {own.name}", remedy=remedy)
        )
    if optional:
        return DtypeError(
            message(op.name, name, expected="a number, None or a 0-dim array", got=got, remedy="Pass a Python number.")
        )
    return DtypeError(message(op.name, name, expected=f"a {kind.name} or a number", got=got, remedy="Convert it first."))


# ---- other producers of DLPack ------------------------------------------------------------------------------------------


def borrow(op: Op, name: str, value: Any) -> Any:
    """Return a NumPy or CuPy array over the memory of a DLPack producer, ordered after the producer's work."""
    if kind_of(value) is not None or not hasattr(value, "__dlpack_device__"):
        return value
    try:
        if value.__dlpack_device__()[0] == _dlpack.CPU:
            return np.from_dlpack(value)
        return _kernel.import_cupy().from_dlpack(value)
    except CudaError:
        raise
    except Exception as error:
        remedy = f"Its own words: {type(error).__name__}: {error}"
        raise DtypeError(
            message(op.name, name, expected="an array that exports itself through DLPack", got=repr(type(value)), remedy=remedy)
        ) from error


def hand_back(result: Any, like: Any) -> Any:
    """Return a result to the library of `like` through its `from_dlpack`; as it is if that library has none."""
    namespace = getattr(like, "__array_namespace__", lambda: None)()
    take = getattr(namespace, "from_dlpack", None)
    return result if take is None else take(result)
