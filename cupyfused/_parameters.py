"""The parameter structs of the kernels, as ctypes sees them: field for field what `cuda_src` declares."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from ._layout import divider
from ._source import SUMS_AT_ONCE, max_dims

__all__ = ["INDEX_LIMIT", "fill_dims", "fill_divider", "map_struct", "partials_struct", "sum_struct"]

INDEX_LIMIT = 1 << 31  # indices below it are counted in 32 bits and divided by a multiplication


def _struct(name: str, fields: list[tuple[str, Any]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _index(large: bool) -> Any:
    return ctypes.c_uint64 if large else ctypes.c_uint32


_Divider = _struct("Divider", [("magic", ctypes.c_uint32), ("shift", ctypes.c_uint32)])
_Scalar = _struct("Scalar", [("access", ctypes.c_uint32), ("dtype", ctypes.c_uint32)])
_Operand = _struct("Operand", [("access", ctypes.c_uint32), ("dtype", ctypes.c_uint32), ("step", ctypes.c_int32)])


@functools.cache
def _dims(tensors: int, large: bool) -> Any:
    stride = ctypes.c_int64 if large else ctypes.c_int32
    dim = _struct("Dim", [("extent", _index(large)), ("divider", _Divider), ("stride", stride * tensors)])
    return dim * max_dims(large)


@functools.cache
def map_struct(operands: int, scalars: int, large: bool) -> Any:
    index = _index(large)
    return _struct(
        "MapParameters",
        [
            ("address", ctypes.c_uint64 * operands),
            ("scalar_address", ctypes.c_uint64 * (scalars + 1)),
            *((name, index) for name in ("threads", "packets", "items_extent")),
            ("tail", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
            ("operand", _Operand * operands),
            ("scalar", _Scalar * (scalars + 1)),
            ("dim", _dims(operands, large)),
            ("item_stride", ctypes.c_int64 * operands),
            ("period", index),
            ("period_divider", _Divider),
        ],
    )


@functools.cache
def sum_struct(operands: int, scalars: int, gradients: int, large: bool) -> Any:
    index, i64, i32, u32 = _index(large), ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32
    tensors = operands + gradients
    return _struct(
        "SumParameters",
        [
            ("address", ctypes.c_uint64 * tensors),
            ("scalar_address", ctypes.c_uint64 * (scalars + 1)),
            *((name, index) for name in ("loop", "loop_per_split", "positions", "packets", "tail_position")),
            ("tail", i32),
            ("tiles", u32),
            ("tile_divider", _Divider),
            *((name, i32) for name in ("lane_bits", "loop_begin", "loop_end", "ndim", "gathered_ndim")),
            ("role", u32 * gradients),
            ("operand", _Operand * tensors),
            ("scalar", _Scalar * (scalars + 1)),
            ("split_stride", i64 * gradients),
            ("tile_stride", i64 * gradients),
            ("dim", _dims(tensors, large)),
        ],
    )


@functools.cache
def partials_struct(large: bool) -> Any:
    index, i32 = _index(large), ctypes.c_int32
    one = _struct(
        "Partials",
        [
            *((name, index) for name in ("kept", "reduced", "inner")),
            ("inner_divider", _Divider),
            ("column_bits", i32),
            ("ndim", i32),
            ("dtype", ctypes.c_uint32),
            ("dim", _dims(1, large)),
        ],
    )
    address = ctypes.c_uint64 * 2
    return _struct("PartialsParameters", [("address", address * SUMS_AT_ONCE), ("gradient", one * SUMS_AT_ONCE)])


def fill_divider(target: Any, extent: int) -> None:
    if extent < INDEX_LIMIT:
        target.magic, target.shift = divider(extent)


def fill_dims(target: Any, extents: Sequence[int]) -> None:
    """Write how far each of the dims goes."""
    for dim, extent in zip(target, extents):
        dim.extent = extent
        fill_divider(dim.divider, extent)
