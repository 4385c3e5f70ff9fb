"""The table of kernel instances that plans can ask for: what `test_compile` builds and what plans are checked against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cupyfused._dtypes import BY_NAME, Dtype
from cupyfused._kernel import Variant
from cupyfused._op import Op
from cupyfused._plan import MAX_ITEMS, MIXED, Storage

NATIVE = [name for name in BY_NAME if name != "bool"]
NUMBERS = (0.5, 1.0, 0.0)  # of backward; constants of a kernel, which differ between releases of PyTorch
EVERYTHING = "STORES | SUMS | SUMS_ROWS"


def storages() -> Iterator[Storage]:
    """How operands can be stored: all alike, x of another dtype, or told at run time."""
    for name in NATIVE:
        yield Storage(name, name, BY_NAME[name])
    for x, result in sorted(MIXED):
        yield Storage(x, result, BY_NAME[result])
    for result_dtype in BY_NAME.values():
        yield Storage("any_dtype", "any_dtype", result_dtype)


def variants(op: Op) -> Iterator[Variant]:
    """Every instance of an op's forward and backward kernels."""
    for stored in storages():
        yield from _general(op, stored)
        if stored.x != "any_dtype":
            if stored.packet > 1:
                yield from _packets(op, stored, stored.packet, 2 if stored.packet == 8 else 1)
            if stored.result.is_floating:
                yield from _packets(op, stored, 1, min(stored.packet, MAX_ITEMS))


def finishing_variants() -> Iterator[Variant]:
    """Every instance of the kernel that finishes sums."""
    for arithmetic, large in itertools.product(("float32", "float64"), (False, True)):
        yield Variant(None, "sum_partials", "", "", "", arithmetic, large=large, gradients=1 if large else 3)


def _variant(
    op: Op, direction: str, stored: Storage, width: int, items: int, forms: tuple[str, ...], duties: tuple[str, ...], large: bool
) -> Variant:
    result: Dtype = stored.result
    numbers = NUMBERS[: len(op.backward_numbers)] if direction == "backward" else ()
    stored_as = (stored.x, stored.parameter, result.stored, result.arithmetic)
    return Variant(op, direction, *stored_as, width, items, forms, duties, large, numbers=numbers)


def _general(op: Op, stored: Storage) -> Iterator[Variant]:
    inputs, items = len(op.inputs), min(stored.packet, MAX_ITEMS)
    for large in (False, True):
        yield _variant(op, "forward", stored, 1, items, ("EITHER",) * inputs, (), large)
        if stored.result.is_floating:
            yield _variant(op, "backward", stored, 1, items, ("EITHER",) * inputs, (EVERYTHING,) * inputs, large)


def _packets(op: Op, stored: Storage, width: int, items: int) -> Iterator[Variant]:
    forms = ("UNIFORM", "PACKETS")
    for parameters in itertools.product(forms, repeat=len(op.inputs) - 1):
        yield _variant(op, "forward", stored, width, items, ("PACKETS", *parameters), (), False)
    if not stored.result.is_floating or stored.x == "uint8":
        return
    for inputs in itertools.product(*(_backward_forms(op, name) for name in op.inputs)):
        for duties in itertools.product(*(_duties(op, name, form) for name, form in zip(op.inputs[1:], inputs[1:]))):
            yield _variant(op, "backward", stored, width, items if width == 1 else 1, inputs, ("STORES", *duties), False)


def _duties(op: Op, name: str, form: str) -> tuple[str, ...]:
    """A gradient summed along dim 0 for each row belongs to a parameter that is broadcast along it, so never loaded in packets."""
    return ("STORES", "SUMS", "SUMS_ROWS") if form == "UNIFORM" else ("STORES", "SUMS")


def _backward_forms(op: Op, name: str) -> tuple[str, ...]:
    """An input that no gradient reads is absent from backward; an x that every gradient reads is always there."""
    if name not in {*op.reads_with_options, *(read for reads in op.reads.values() for read in reads)}:
        return ("UNIFORM",)
    if name == op.inputs[0] and name in op.reads_with_options:
        return ("PACKETS",)
    return ("UNIFORM", "PACKETS")
