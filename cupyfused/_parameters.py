"""The parameter structs of the kernels, as ctypes sees them: field for field what `cuda_src` declares."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from ._layout import divider
from ._source import max_dims

__all__ = ["INDEX_LIMIT", "fill_dims", "map_struct", "partials_struct", "sum_struct"]

INDEX_LIMIT = 1 << 31  # indices below it are counted in 32 bits and divided by a multiplication


def _struct(name: str, fields: list[tuple[str, Any]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def _operand_struct(large: bool) -> Any:
    stride = ctypes.c_int64 if large else ctypes.c_int32
    return _struct(
        "Operand",
        [("stride", stride * max_dims(large)), ("step", ctypes.c_int32), ("access", ctypes.c_uint8), ("dtype", ctypes.c_uint8)],
    )


@functools.cache
def _dims_struct(large: bool) -> Any:
    return _struct(
        "Dims",
        [
            ("extent", ctypes.c_uint64 * max_dims(large)),
            ("magic", ctypes.c_uint32 * max_dims(large)),
            ("shift", ctypes.c_uint8 * max_dims(large)),
        ],
    )


_Scalar = _struct("Scalar", [("access", ctypes.c_uint8), ("dtype", ctypes.c_uint8)])


@functools.cache
def map_struct(operands: int, scalars: int, large: bool) -> Any:
    u64 = ctypes.c_uint64
    return _struct(
        "MapParameters",
        [
            ("address", u64 * operands),
            ("scalar_address", u64 * (scalars + 1)),
            ("operand", _operand_struct(large) * operands),
            ("scalar", _Scalar * (scalars + 1)),
            ("dims", _dims_struct(large)),
            ("item_stride", ctypes.c_int64 * operands),
            *((name, u64) for name in ("items_extent", "threads", "packets")),
            ("tail", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
        ],
    )


@functools.cache
def sum_struct(operands: int, scalars: int, gradients: int, large: bool) -> Any:
    u64, i64, u32, i32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int32
    return _struct(
        "SumParameters",
        [
            ("address", u64 * (operands + gradients)),
            ("scalar_address", u64 * (scalars + 1)),
            ("operand", _operand_struct(large) * (operands + gradients)),
            ("scalar", _Scalar * (scalars + 1)),
            ("dims", _dims_struct(large)),
            ("split_stride", i64 * gradients),
            ("tile_stride", i64 * gradients),
            *((name, u64) for name in ("loop", "loop_per_split", "positions", "packets")),
            *((name, u32) for name in ("splits", "tiles")),
            *((name, i32) for name in ("tail", "position_lanes", "loop_begin", "loop_end", "ndim")),
            ("role", ctypes.c_uint8 * gradients),
        ],
    )


@functools.cache
def partials_struct(gradients: int, large: bool) -> Any:
    operand, dims = _operand_struct(large), _dims_struct(large)
    one = _struct(
        "Partials",
        [
            *((name, ctypes.c_uint64) for name in ("kept", "reduced")),
            ("kept_dims", dims),
            ("reduced_dims", dims),
            ("kept_operand", operand * 2),
            ("reduced_operand", operand),
            *((name, ctypes.c_int32) for name in ("kept_ndim", "reduced_ndim", "columns")),
        ],
    )
    return _struct("PartialsParameters", [("address", ctypes.c_uint64 * 2 * gradients), ("gradient", one * gradients)])


def fill_dims(target: Any, extents: Sequence[int]) -> None:
    for dim, extent in enumerate(extents):
        target.extent[dim] = extent
        if extent < INDEX_LIMIT:
            target.magic[dim], target.shift[dim] = divider(extent)
