"""Every bad input to an operator, and the error that it must meet: the table that `test_errors` goes through.

A message reads `<op>: <argument>: expected <what>, got <what>. <what mends it>`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ma  # here, since NumPy loads it when it is first asked for

from cupyfused import DtypeError, OperandError

__all__ = ["CLAMP", "OPS", "TABLE", "Bad", "Numpy", "Torch"]

OPS = ("fused_scale_bias", "fused_scale_bias_clamp")
CLAMP = OPS[1:]
Library = Any  # Numpy or Torch


class Numpy:
    kind, other_kind = "numpy.ndarray", "torch.Tensor"

    @staticmethod
    def array(*shape: int, dtype: str = "float32") -> Any:
        return np.asarray(np.random.default_rng().uniform(1, 100, shape)).astype(dtype)

    @staticmethod
    def expanded(array: Any, *shape: int) -> Any:
        """Like broadcast_to, whose result may not be written to."""
        return np.lib.stride_tricks.as_strided(array, shape, np.broadcast_to(array, shape).strides)


class Torch:
    kind, other_kind = "torch.Tensor", "numpy.ndarray"

    @staticmethod
    def array(*shape: int, dtype: str = "float32") -> Any:
        return (torch.rand(shape) * 99 + 1).to(getattr(torch, dtype))

    @staticmethod
    def expanded(array: Any, *shape: int) -> Any:
        return array.expand(shape)


OTHER = {Numpy: Torch, Torch: Numpy}
Make = Callable[[Library], Any]


@dataclass(frozen=True)
class Bad:
    """One bad call: `make` gives the arguments that differ from a good one's; expected and got are regular expressions."""

    name: str
    argument: str
    error: type[Exception]
    expected: str
    got: str
    make: Make
    libraries: tuple[Library, ...] = (Numpy, Torch)
    ops: tuple[str, ...] = OPS

    def pattern(self, lib: Library, op: str) -> str:
        expected, got = (one.replace("{kind}", lib.kind).replace("{other}", lib.other_kind) for one in (self.expected, self.got))
        return rf"{op}: {self.argument}: expected ({expected}), got ({got})\. [A-Z`].+\."


def each(
    arguments: tuple[str, ...], name: str, error: type[Exception], expected: str, got: str, value: Make, **more: Any
) -> list[Bad]:
    """The same bad value in the place of each of several arguments."""
    rows = ((one, expected.replace("{argument}", one)) for one in arguments)
    return [Bad(f"{one} {name}", one, error, words, got, lambda lib, one=one: {one: value(lib)}, **more) for one, words in rows]


INPUTS, PARAMETERS, BOUNDS = ("x", "scale", "bias"), ("scale", "bias"), ("min_val", "max_val")


# ---- what is no array, of another library, of another device, or does not broadcast -------------------------------------

NO_NUMBERS = {"None": None, "list": [1.5, 2.5, 3.5], "str": "abc", "dict": {"a": 1.5}, "complex": 1.5j, "bytes": b"abc"}
NO_ARRAYS = NO_NUMBERS | {"number": 2.5, "NumPy scalar": np.float32(2.5), "range": range(3)}
BOUND = "a number, None or a 0-dim array"


def type_name(value: Any) -> str:
    return rf"(\w+\.)?{type(value).__name__}"


def no_arrays() -> list[Bad]:
    rows = []
    for name, value in NO_ARRAYS.items():
        rows += each(("x",), name, DtypeError, "an array", type_name(value), lambda lib, value=value: value)
        if value is not None:
            rows += each(("out",), name, DtypeError, "a {kind}( like x)?", type_name(value), lambda lib, value=value: value)
    for name, value in NO_NUMBERS.items():
        rows += each(PARAMETERS, name, DtypeError, "a {kind} or a number", type_name(value), lambda lib, value=value: value)
        if value is not None:
            rows += each(BOUNDS, name, DtypeError, BOUND, type_name(value), lambda lib, value=value: value, ops=CLAMP)
    return rows


def other_kinds() -> list[Bad]:
    own = "a {kind} like x, or a number"
    return [
        *each(PARAMETERS, "of another kind", DtypeError, own, "a {other}", lambda lib: OTHER[lib].array(3)),
        *each(PARAMETERS, "0-dim tensor", DtypeError, own, "a {other}", lambda lib: Torch.array(), libraries=(Numpy,)),
        *each(BOUNDS, "0-dim tensor", DtypeError, own, "a {other}", lambda lib: Torch.array(), libraries=(Numpy,), ops=CLAMP),
        *each(BOUNDS, "1-D array", DtypeError, own, "a {other}", lambda lib: Numpy.array(1), libraries=(Torch,), ops=CLAMP),
        *each(
            ("out",),
            "of another kind",
            DtypeError,
            "a {kind}( like x)?",
            "(a )?({other}|ndarray)",
            lambda lib: OTHER[lib].array(2, 3),
        ),
    ]


def devices() -> list[Bad]:
    def meta(lib: Library, *shape: int) -> Any:
        return lib.array(*shape).to("meta")

    torch_only: dict[str, Any] = {"libraries": (Torch,)}
    return [
        *each(
            PARAMETERS, "on another device", OperandError, "the device of x, cpu", "meta.*", lambda lib: meta(lib, 3), **torch_only
        ),
        *each(BOUNDS, "on another device", OperandError, "the device of x, cpu", "meta.*", meta, **torch_only, ops=CLAMP),
        *each(
            ("out",), "on another device", OperandError, "device cpu", "(device )?meta.*", lambda lib: meta(lib, 2, 3), **torch_only
        ),
        Bad("x on meta", "bias", OperandError, "the device of x, meta.*", "cpu", lambda lib: {"x": meta(lib, 2, 3)}, (Torch,)),
    ]


def shapes() -> list[Bad]:
    common = "operands", OperandError, "shapes that broadcast together"
    x, bias = r"x \(2, 3\)", r"bias \(3,\)"
    return [
        Bad("scale does not broadcast", *common, rf"{x}, scale \(2,\), {bias}", lambda lib: {"scale": lib.array(2)}),
        Bad("bias does not broadcast", *common, rf"{x}, bias \(4, 1, 2\)", lambda lib: {"bias": lib.array(4, 1, 2)}),
        Bad("no elements against some", *common, rf"{x}, scale \(0, 3\), {bias}", lambda lib: {"scale": lib.array(0, 3)}),
    ]


# ---- dtypes -------------------------------------------------------------------------------------------------------------

STORED = (
    "(a strided (array|tensor) of )?one of the dtypes bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64"
)
NUMPY_DTYPES = {
    "object": "object",
    "U3": "<U3",
    "S3": r"\|S3",
    "datetime64[s]": r"datetime64\[s\]",
    "longdouble": r"float\d+|longdouble",
}
NUMPY_DTYPES |= {">f4": ">f4", "f4, i4": r".*<f4.*"}


def silently(make: Callable[[], Any]) -> Make:
    """Build a tensor of a kind that PyTorch itself announces with warnings."""

    def build(lib: Library) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return build


def masked(lib: Library) -> Any:
    return ma.masked_array(lib.array(2, 3), mask=[[False, True, False]] * 2)


def dtypes() -> list[Bad]:
    rows = each(INPUTS, "masked", DtypeError, STORED, "a masked array", masked, libraries=(Numpy,))
    for name in ("complex64", "complex128", "uint16", "uint32", "uint64"):
        got = rf"(torch\.)?{name}"
        rows += each((*INPUTS, "out"), name, DtypeError, STORED, got, lambda lib, name=name: lib.array(2, 3, dtype=name))
    for name, got in NUMPY_DTYPES.items():
        array = np.ones((2, 3)).astype(name)
        rows += each((*INPUTS, "out"), name, DtypeError, STORED, got, lambda lib, array=array: array.copy(), libraries=(Numpy,))
    for name in ("float8_e4m3fn", "float8_e5m2"):
        made = silently(lambda name=name: Torch.array(2, 3, dtype=name))
        rows += each((*INPUTS, "out"), name, DtypeError, STORED, rf"torch\.{name}", made, libraries=(Torch,))
    ragged = [torch.rand(2) + 1, torch.rand(3) + 1]
    for name, got, make in (
        ("sparse", r"a tensor of layout torch\.sparse_coo", lambda: Torch.array(2, 3).to_sparse()),
        ("sparse rows", r"a tensor of layout torch\.sparse_csr", lambda: Torch.array(2, 3).to_sparse_csr()),
        ("quantised", "a quantised tensor", lambda: torch.quantize_per_tensor(Torch.array(2, 3), 0.5, 3, torch.qint8)),
        ("nested", "a nested tensor", lambda: torch.nested.nested_tensor(ragged)),
        ("jagged", "a nested tensor", lambda: torch.nested.nested_tensor(ragged, layout=torch.jagged)),
    ):
        rows += each((*INPUTS, "out"), name, DtypeError, STORED, got, silently(make), libraries=(Torch,))
    return rows


# ---- bounds -------------------------------------------------------------------------------------------------------------

# Numbers that no array of the dtype holds. A float instead would promote, an array of one element would wrap.
BEYOND = (("uint8", -1), ("uint8", 256), ("int8", 128), ("int16", -40_000), ("int32", 1 << 31), ("int64", 1 << 63))


def bounds() -> list[Bad]:
    rows = []
    for shape in ((1,), (2, 3)):
        got = rf"an array of shape {re.escape(str(shape))}"
        rows += each(BOUNDS, f"{shape}", OperandError, BOUND, got, lambda lib, shape=shape: lib.array(*shape), ops=CLAMP)
    free = "a bound without gradient"
    rows += each(BOUNDS, "with gradient", OperandError, free, "one with requires_grad", leaf, libraries=(Torch,), ops=CLAMP)
    for one in BOUNDS:
        for dtype, number in BEYOND:

            def make(lib: Library, one: str = one, dtype: str = dtype, number: int = number) -> dict[str, Any]:
                return {"x": lib.array(2, 3, dtype=dtype), "scale": 2, "bias": 1, "min_val": None, "max_val": None, one: number}

            rows.append(
                Bad(f"{one} {number} of {dtype}", one, OperandError, f"a number that {dtype} holds", str(number), make, ops=CLAMP)
            )
    of_bool: dict[str, Any] = {"scale": True, "bias": False, "min_val": True, "max_val": None}
    no_bool = "x", DtypeError, "a result that is not bool", "bool"
    rows.append(Bad("clamp of bool", *no_bool, lambda lib: {"x": lib.array(2, 3, dtype="bool")} | of_bool, ops=CLAMP))
    return rows


# ---- out and impl -------------------------------------------------------------------------------------------------------


def leaf(lib: Library, *shape: int) -> Any:
    return lib.array(*shape).requires_grad_()


def overlapping(lib: Library, argument: str) -> dict[str, Any]:
    rows = lib.array(4, 3)
    return {argument: rows[:2], "out": rows[1:3]}


def transposed(lib: Library) -> dict[str, Any]:
    square = lib.array(3, 3)
    return {"x": square, "out": square.T}


def read_only(lib: Library) -> Any:
    array = lib.array(2, 3)
    array.flags.writeable = False
    return array


def outs() -> list[Bad]:
    rows = []
    for shape in ((3, 2), (1, 3), (2, 3, 1), (6,), ()):
        got = re.escape(str(shape))
        rows += each(("out",), f"{shape}", OperandError, r"shape \(2, 3\)", got, lambda lib, shape=shape: lib.array(*shape))
    for name in ("float64", "float16", "int32", "bool"):
        rows += each(("out",), name, DtypeError, "dtype float32", name, lambda lib, name=name: lib.array(2, 3, dtype=name))
    for one in INPUTS:
        apart = f"memory apart from {one}, or {one} itself"
        rows.append(
            Bad(f"out overlaps {one}", "out", OperandError, apart, "a partial overlap", lambda lib, one=one: overlapping(lib, one))
        )
    apart = "memory apart from x, or x itself"
    rows.append(Bad("out is x transposed", "out", OperandError, apart, "a partial overlap", transposed))
    own = "elements that each have a place of their own"
    rows += each(("out",), "expanded", OperandError, own, r"strides \(0, 1\)", lambda lib: lib.expanded(lib.array(1, 3), 2, 3))
    rows += each(
        ("out",), "read-only", OperandError, "an array that can be written to", "a read-only one", read_only, libraries=(Numpy,)
    )
    no_gradient = "out", OperandError, "no gradient to be asked for", ".*requires_grad"
    for one in (*INPUTS, "out"):
        rows.append(Bad(f"out beside {one} with gradient", *no_gradient, lambda lib, one=one: graded(lib, one), (Torch,)))
    return rows


def graded(lib: Library, argument: str) -> dict[str, Any]:
    return {"out": lib.array(2, 3)} | {argument: leaf(lib, 2, 3)}


def impls() -> list[Bad]:
    rows = each(("impl",), "of CUDA on the CPU", OperandError, "CUDA arrays with impl='cuda'", "arrays on cpu", lambda lib: "cuda")
    for value in ("nonsense", "CUDA", "", None, 3, ["cuda"]):
        got = re.escape(repr(value))
        rows += each(("impl",), repr(value), OperandError, "one of auto, cuda, reference", got, lambda lib, value=value: value)
    return rows


TABLE = [*shapes(), *devices(), *no_arrays(), *other_kinds(), *bounds(), *dtypes(), *outs(), *impls()]
