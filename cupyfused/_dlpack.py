"""Reading an array's DLPack descriptor: where its data lies, its shape, strides, dtype and device, with nothing copied.

The capsule is only looked into, never consumed: when Python drops it, its own destructor gives the memory back.
Layout: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ._dtypes import BY_NAME, Dtype
from ._layout import contiguous_strides

__all__ = ["CPU", "CUDA", "Descriptor", "read"]

CPU, CUDA = 1, 2  # DLDeviceType


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}  # DLDataTypeCode
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class Descriptor(NamedTuple):
    """What a DLPack capsule says of an array; strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype | None  # None: one that kernels do not store
    device: tuple[Any, int]


def read(capsule: Any) -> Descriptor:
    """Read a capsule of either DLPack version."""
    if _is_valid(capsule, b"dltensor_versioned"):
        tensor = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned")).tensor
    else:
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape)
    kind = _CODES.get(tensor.code, "")
    name = {"bool": "bool", "bfloat": "bfloat16"}.get(kind, f"{kind}{tensor.bits}")
    dtype = BY_NAME.get(name) if tensor.lanes == 1 else None
    address = (tensor.data or 0) + tensor.byte_offset
    return Descriptor(address, shape, strides, dtype, (tensor.device_type, tensor.device_id))
