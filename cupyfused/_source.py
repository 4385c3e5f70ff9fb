"""What a kernel is compiled from: the files of `cuda_src` as one text, with what differs from kernel to kernel defined above it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["BLOCK", "LARGE_DIMS", "RESIDENT", "SMALL_DIMS", "SUMS_AT_ONCE", "Variant", "cuda_text", "max_dims"]

BLOCK = 256  # threads; 16-byte vectors, one a thread, ran at 4,382 GB/s with 256 on an H200 where a device copy ran at 4,205
RESIDENT = 4  # blocks that run at once on a multiprocessor in backward: 64 registers a thread
SUMS_AT_ONCE = 3  # that one launch of sum_partials finishes
SMALL_DIMS = 8  # collapsed dims that a kernel's parameters have room for
LARGE_DIMS = 32  # and those of a `large` instance, compiled where a call needs more dims or 64-bit indices


def max_dims(large: bool) -> int:
    """Return the dims that an instance has room for."""
    return LARGE_DIMS if large else SMALL_DIMS


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for. `x`, `parameter`: how inputs are stored, `any_dtype` where that is told at run time."""

    op: Op | None  # None: the finishing kernel of sums
    direction: str  # forward, backward or sum_partials
    x: str
    parameter: str
    result: str
    arithmetic: str
    width: int = 1
    items: int = 1
    forms: tuple[str, ...] = ()  # enum Form for each input
    duties: tuple[str, ...] = ()  # of enum Duty for each gradient
    large: bool = False  # 64-bit indices and strides, and room for LARGE_DIMS
    numbers: tuple[float, ...] = ()  # backward: of `Op.backward_numbers`; as constants they cost no instructions

    @property
    def is_general(self) -> bool:
        """Whether this is the instance that keeps everything open, for what is rare."""
        return "EITHER" in self.forms

    @property
    def kernel_name(self) -> str:
        return f"{self.op.name}_{self.direction}" if self.op else "cupyfused_sum_partials"

    def describe(self) -> str:
        """Name it in an error message."""
        layout = (
            f"{self.items} packets of {self.width}, {' '.join((*self.forms, *self.duties))}, {64 if self.large else 32}-bit index"
        )
        return f"{self.kernel_name} (x {self.x}, parameters {self.parameter}, result {self.result}; {layout})"

    def source(self) -> str:
        """Return the whole translation unit; `#line` makes the compiler speak of our files."""
        defines = {
            "ARITHMETIC": self.arithmetic,
            "KERNEL": self.kernel_name,
            "BLOCK": BLOCK,
            "MAX_DIMS": max_dims(self.large),
            "INDEX": "uint64" if self.large else "uint32",
            "STRIDE": "int64" if self.large else "int32",
            "GENERAL": int(self.is_general),
            "WIDTH": self.width,
            "ITEMS": self.items,
            "GRADIENT_COUNT": SUMS_AT_ONCE,
            "RESIDENT": 1 if self.is_general else RESIDENT,
        }
        if self.op is None:
            texts = [("common.cuh", cuda_text("common.cuh")), ("sum_partials.cuh", cuda_text("sum_partials.cuh"))]
        else:
            defines |= self._op_defines(self.op)
            functor = (f"{self.op.name}.cuh", self.op.functor)
            texts = [("common.cuh", cuda_text("common.cuh")), functor, ("elementwise.cuh", cuda_text("elementwise.cuh"))]
        head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
        return head + "".join(f'#line 1 "{name}"\n{text}\n' for name, text in texts)

    def _op_defines(self, op: Op) -> dict[str, object]:
        forward = self.direction == "forward"
        first, *others = op.inputs
        inputs = [(first, self.x), *((name, self.parameter) for name in others)]
        result = (
            "result" if forward else "grad_out",
            self.result,
            "EITHER" if self.is_general else "PACKETS" if forward else "SPREAD",
        )
        # An input does not change along the loop of a thread if its gradient is summed in registers, or if it is gathered.
        duties = self.duties or ("",) * len(inputs)
        held = [str(int(duty == "SUMS" or form == "GATHERED")) for duty, form in zip(duties, self.forms)]
        operands = [(*result, "0"), *((*one, form, kept) for one, form, kept in zip(inputs, self.forms, held))]
        arguments = [f"ELEMENT_OF({name})" for name in op.inputs] + list(op.options)
        defines: dict[str, object] = {
            "OP": op.name,
            "OPERANDS(F)": _each(operands),
            "OPERAND_COUNT": len(operands),
            "SCALARS(F)": _each([(name,) for name in op.options]),
            "SCALAR_COUNT": len(op.options),
        }
        if forward:
            return defines | {"FORWARD": 1, "ARGUMENTS": ", ".join(arguments)}
        arguments = ["ELEMENT_OF(grad_out)", *arguments, *(f"(A){float(number)!r}" for number in self.numbers)]
        arguments += [f"gradient[{k}]" for k in range(len(inputs))]
        return defines | {
            "GRADIENTS(F)": _each([(f"grad_{name}", kind, duties) for (name, kind), duties in zip(inputs, self.duties)]),
            "GRADIENT_COUNT": len(inputs),
            "ARGUMENTS": ", ".join(arguments),
        }


def _each(rows: Sequence[tuple[str, ...]]) -> str:
    """Spell a list for the preprocessor: F(0, ...) F(1, ...)."""
    return " ".join(f"F({', '.join((str(k), *row))})" for k, row in enumerate(rows))


@functools.cache
def cuda_text(name: str) -> str:
    """Return one file of `cuda_src`."""
    from importlib import resources

    return resources.files("cupyfused.cuda_src").joinpath(name).read_text(encoding="ascii")
