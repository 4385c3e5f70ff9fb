"""The table of kernel instances that plans can ask for: what `warmup` compiles ahead, and what tests hold every plan to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ._dtypes import BY_NAME, Dtype, Rank, Typed, fold_types
from ._kernel import Variant
from ._layout import Ints, Strided
from ._plan import MAX_ITEMS, Described, Storage, storage
from ._sum_plan import EVERY_DUTY

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["storages", "table"]

Words = tuple[str, ...]


def table(ops: Sequence[Op], dtypes: Sequence[Dtype], large: bool) -> list[Variant]:
    """Return every instance that calls of `ops` with arrays of `dtypes` and numbers can ask for, `large` ones if wanted."""
    stored = storages(dtypes)
    sizes = (False, True) if large else (False,)
    return [*(variant for op in ops for one in stored for variant in _instances(op, one, sizes)), *_finishing(stored, sizes)]


def storages(dtypes: Sequence[Dtype]) -> list[Storage]:
    """Return how the operands of such calls are stored: x as the result, x of another dtype, or told at run time."""
    arrays = [Typed(dtype, rank) for dtype in dtypes for rank in (Rank.ARRAY, Rank.ZERO_DIM)]
    numbers = [Typed(BY_NAME[name], Rank.NUMBER) for name in ("bool", "int64", "float32")]
    found = {}
    # Two parameters are enough: no promotion takes three operands, and an option promotes as a number or 0-dim parameter does.
    for typed in itertools.product(arrays, [*arrays, *numbers], [*arrays, *numbers]):
        described = [Described(one.dtype, None if one.rank is Rank.NUMBER else Strided((), ())) for one in typed]
        found[storage(described, fold_types(typed, []))] = True
    return list(found)


def _instances(op: Op, stored: Storage, sizes: Sequence[bool]) -> Iterator[Variant]:
    """Every instance of an op's forward and backward kernels for operands stored like this."""
    inputs, items = len(op.inputs), min(stored.packet, MAX_ITEMS)
    is_trained = stored.result.is_floating
    if stored.result.name == "bool" and not op.takes_bool:
        return
    for large in sizes:
        yield _variant(op, "forward", stored, (1, items), ("EITHER",) * inputs, (), large)
        if is_trained:
            yield _variant(op, "backward", stored, (1, items), ("EITHER",) * inputs, (EVERY_DUTY,) * inputs, large)
    if stored.x == "any_dtype" or stored.packet == 1:
        return
    for forms in itertools.product(("UNIFORM", "PACKETS"), repeat=inputs - 1):
        yield _variant(op, "forward", stored, (stored.packet, 1), ("PACKETS", *forms), ())
    if is_trained and stored.x != "uint8":
        for forms, duties in sorted(_backward_packets(op)):
            yield _variant(op, "backward", stored, (stored.packet, 1), forms, duties)


def _variant(op: Op, direction: str, stored: Storage, packets: Ints, forms: Words, duties: Words, large: bool = False) -> Variant:
    width, items = packets
    result = stored.result
    return Variant(op, direction, stored.x, stored.parameter, result.stored, result.arithmetic, width, items, forms, duties, large)


def _backward_packets(op: Op) -> set[tuple[Words, Words]]:
    """Return the forms of inputs and duties of gradients that can come together in a backward pass in packets.

    An input that no wanted gradient reads is absent, which is UNIFORM; x, which is never broadcast here, is UNIFORM only then.
    """
    x, *parameters = op.inputs
    found: set[tuple[Words, Words]] = set()
    for has_options in (False, True)[: 1 + bool(op.options)]:
        read = op.saved((True,) * len(op.inputs), has_options)
        for forms in itertools.product(*(("UNIFORM", "PACKETS") if name in read else ("UNIFORM",) for name in op.inputs)):
            is_absent = forms[0] == "UNIFORM"
            if is_absent and has_options and x in op.reads_with_options:
                continue
            choices = [
                ("STORES",) if is_absent and x in op.reads[name] else _duties(form) for name, form in zip(parameters, forms[1:])
            ]
            found |= {(forms, ("STORES", *duties)) for duties in itertools.product(*choices)}
    return found


def _duties(form: str) -> Words:
    """A gradient summed along dim 0 for each row belongs to a parameter that is broadcast along it, so never loaded in packets."""
    return ("STORES", "SUMS", "SUMS_ROWS") if form == "UNIFORM" else ("STORES", "SUMS")


def _finishing(stored: Sequence[Storage], sizes: Sequence[bool]) -> Iterator[Variant]:
    """Every instance of the kernel that finishes sums."""
    for arithmetic in sorted({one.result.arithmetic for one in stored if one.result.is_floating}):
        for large in sizes:
            yield Variant(None, "sum_partials", "", "", "", arithmetic, large=large, gradients=1 if large else 3)
