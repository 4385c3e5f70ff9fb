"""The dtypes that kernels store and how they promote: PyTorch's rules, without PyTorch.

CuPy and NumPy arrays follow them too, so that one op gives one answer for every array kind; `uint8 * 0.5` is float32.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["BY_NAME", "DTYPES", "Dtype", "Rank", "Typed", "fit_number", "fold_types", "number_dtype", "promote", "result_type"]


@dataclass(frozen=True)
class Dtype:
    """One storage type: its name in NumPy and PyTorch, its size in bytes, and what kernels compute it in."""

    name: str
    size: int
    category: int  # 0: bool, 1: integer, 2: floating
    arithmetic: str  # the CUDA type of the arithmetic
    code: int  # its place in `enum Dtype` of cuda_src/common.cuh

    @property
    def is_floating(self) -> bool:
        return self.category == 2

    @property
    def stored(self) -> str:
        """Its name in CUDA C."""
        return "boolean" if self.name == "bool" else self.name


_ROWS = [
    ("bool", 1, 0, "int32"),
    ("uint8", 1, 1, "uint8"),
    ("int8", 1, 1, "int8"),
    ("int16", 2, 1, "int16"),
    ("int32", 4, 1, "int32"),
    ("int64", 8, 1, "int64"),
    ("float16", 2, 2, "float32"),
    ("bfloat16", 2, 2, "float32"),
    ("float32", 4, 2, "float32"),
    ("float64", 8, 2, "float64"),
]
DTYPES = tuple(Dtype(*row, code) for code, row in enumerate(_ROWS))
BY_NAME = {dtype.name: dtype for dtype in DTYPES}


class Rank(enum.IntEnum):
    """How much an operand has to say in promotion: an array with dims before a 0-dim one before a Python number."""

    NUMBER = 0
    ZERO_DIM = 1
    ARRAY = 2


class Typed(NamedTuple):
    """An operand as promotion sees it."""

    dtype: Dtype
    rank: Rank


def promote(a: Dtype, b: Dtype) -> Dtype:
    """Return the smallest dtype that holds both, as `torch.promote_types` does.

    Examples
    --------
    >>> promote(BY_NAME["uint8"], BY_NAME["int8"]).name, promote(BY_NAME["float16"], BY_NAME["bfloat16"]).name
    ('int16', 'float32')
    """
    if a.category != b.category:
        return a if a.category > b.category else b
    if {a.name, b.name} == {"uint8", "int8"}:
        return BY_NAME["int16"]
    if {a.name, b.name} == {"float16", "bfloat16"}:
        return BY_NAME["float32"]
    return a if a.code > b.code else b


def result_type(a: Typed, b: Typed) -> Typed:
    """Return what a binary operation of two operands gives, as `torch.result_type` does.

    The operand of lower rank only counts when its category is higher.
    """
    if a.rank == b.rank:
        return Typed(promote(a.dtype, b.dtype), a.rank)
    high, low = (a, b) if a.rank > b.rank else (b, a)
    if low.dtype.category <= high.dtype.category:
        return high
    return Typed(promote(high.dtype, low.dtype), high.rank)


def fold_types(inputs: Sequence[Typed], options: Sequence[Typed]) -> Dtype:
    """Return the dtype of the composed expression: each input in turn, then the options, which promote among themselves first."""
    result = _fold(inputs)
    return result_type(result, _fold(options)).dtype if options else result.dtype


def _fold(typed: Sequence[Typed]) -> Typed:
    result = typed[0]
    for one in typed[1:]:
        result = result_type(result, one)
    return result


def number_dtype(number: bool | int | float, default_float: Dtype = BY_NAME["float32"]) -> Dtype:
    """Return the dtype that a Python number counts as: bool, int64, or the default floating dtype."""
    if isinstance(number, bool):
        return BY_NAME["bool"]
    return BY_NAME["int64"] if isinstance(number, int) else default_float


# From here on a number rounds to infinity: half a step above the largest.
_OVERFLOW = {"float32": 3.4028235677973366e38, "float64": 2**1024 - 2**970}


def fit_number(number: int | float, result: Dtype) -> int | float:
    """Return what a number is once it stands in the arithmetic of `result`: floats overflow to infinity, integers wrap."""
    if not result.is_floating:
        bits = 8 * (result.size if result.category else 4)
        wrapped = int(number) % (1 << bits)
        return wrapped - (1 << bits) if result.name != "uint8" and wrapped >> (bits - 1) else wrapped
    overflow = _OVERFLOW[result.arithmetic]
    if number >= overflow:
        return float("inf")
    return float("-inf") if number <= -overflow else float(number)
