"""The table of kernel instances that plans can ask for: what `warmup` compiles ahead, and what tests hold every plan to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ._dtypes import BY_NAME, Dtype, Rank, Typed, fold_types
from ._layout import Strided
from ._map_plan import REPEATING_ITEMS
from ._plan import MAX_ITEMS, Described, Storage, storage
from ._source import Variant
from ._sum_plan import EVERY_DUTY

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["storages", "table"]

Words = tuple[str, ...]
Numbers = tuple[float, ...]


def table(ops: Sequence[Op], dtypes: Sequence[Dtype], numbers: Callable[[Op], Numbers | None], large: bool) -> list[Variant]:
    """Return every instance that calls of `ops` with arrays of `dtypes` and numbers can ask for.

    `numbers` returns those of an op's backward, None if no gradients are asked for; `large` instances come if they are wanted.
    """
    stored = storages(dtypes)
    sizes = (False, True) if large else (False,)
    found = [variant for op in ops for one in stored for variant in _forward(op, one, sizes)]
    trained = [(op, own) for op in ops if (own := numbers(op)) is not None]
    found += [variant for op, own in trained for one in stored for variant in _backward(op, one, own, sizes)]
    return [*found, *(_finishing(stored, sizes) if trained else [])]


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


def _forward(op: Op, stored: Storage, sizes: Sequence[bool]) -> Iterator[Variant]:
    """Every instance of an op's forward kernel for operands stored like this."""
    if stored.result.name == "bool" and not op.takes_bool:
        return
    inputs = len(op.inputs)
    for large in sizes:
        yield _variant(op, "forward", stored, (1, min(stored.packet, MAX_ITEMS)), ("EITHER",) * inputs, (), large=large)
    for width, items in _packets(stored):
        x_forms = ("PACKETS", "SHIFTED") if width > 1 else ("PACKETS",)
        for forms in itertools.product(x_forms, *[("UNIFORM", "PACKETS")] * (inputs - 1)):
            yield _variant(op, "forward", stored, (width, items), forms, ())
    if stored.x != "any_dtype" and stored.result.is_floating and stored.packet > 1:
        for forms in itertools.product(("UNIFORM", "PACKETS", "GATHERED"), repeat=inputs - 1):
            if "GATHERED" in forms:
                yield _variant(op, "forward", stored, (stored.packet, REPEATING_ITEMS), ("PACKETS", *forms), ())


def _backward(op: Op, stored: Storage, numbers: Numbers, sizes: Sequence[bool]) -> Iterator[Variant]:
    """Every instance of an op's backward kernel for operands stored like this."""
    if not stored.result.is_floating:
        return
    inputs, single = len(op.inputs), (1, min(stored.packet, MAX_ITEMS))
    for large in sizes:
        yield _variant(op, "backward", stored, single, ("EITHER",) * inputs, (EVERY_DUTY,) * inputs, numbers, large)
    if stored.x != "uint8":
        for width, items in _packets(stored):
            for forms, duties in sorted(_backward_packets(op, in_packets=width > 1)):
                yield _variant(op, "backward", stored, (width, items if width == 1 else 1), forms, duties, numbers)


def _packets(stored: Storage) -> Iterator[tuple[int, int]]:
    """The packets that have instances of their own, and how many of them a thread of forward takes."""
    if stored.x == "any_dtype":
        return
    if stored.packet > 1:
        yield stored.packet, 2 if stored.packet == 8 else 1
    if stored.result.is_floating:
        yield 1, min(stored.packet, MAX_ITEMS)


def _variant(
    op: Op,
    direction: str,
    stored: Storage,
    packets: tuple[int, int],
    forms: Words,
    duties: Words,
    numbers: Numbers = (),
    large: bool = False,
) -> Variant:
    result = stored.result
    stored_as = (stored.x, stored.parameter, result.stored, result.arithmetic)
    return Variant(op, direction, *stored_as, *packets, forms, duties, large, numbers=numbers)


def _backward_packets(op: Op, in_packets: bool) -> set[tuple[Words, Words]]:
    """Return the forms of inputs and duties of gradients that can come together in a backward pass that has an instance of its own.

    An input that no wanted gradient reads is absent, which is UNIFORM; x, which is never broadcast here, is UNIFORM only then.
    """
    x, *parameters = op.inputs
    found: set[tuple[Words, Words]] = set()
    for has_options in (False, True)[: 1 + bool(op.options)]:
        read = op.saved((True,) * len(op.inputs), has_options)
        for forms in itertools.product(*(_forms(name is x, name in read, in_packets) for name in op.inputs)):
            is_absent, gathers = forms[0] == "UNIFORM", "GATHERED" in forms
            if (is_absent and has_options and x in op.reads_with_options) or (gathers and forms[0] == "SHIFTED"):
                continue
            choices = [
                ("STORES",) if is_absent and x in op.reads[name] else _duties(form, gathers)
                for name, form in zip(parameters, forms[1:])
            ]
            for duties in itertools.product(*choices):
                # Where some parameter is gathered, a gradient that is wanted is summed, or as large as x. x is there for one.
                asked = [duty == "SUMS" or form == "PACKETS" for form, duty in zip(forms[1:], duties)]
                reads_x = has_options or any(x in op.reads[name] for name, one in zip(parameters, asked) if one)
                if reads_x or is_absent or not gathers:
                    found.add((forms, ("STORES", *duties)))
    return found


def _forms(is_x: bool, is_read: bool, in_packets: bool) -> Words:
    if not is_read:
        return ("UNIFORM",)
    return ("UNIFORM", "PACKETS", *(("SHIFTED" if is_x else "GATHERED",) if in_packets else ()))


def _duties(form: str, gathers: bool) -> Words:
    """A gradient summed along dim 0 for each row belongs to a parameter that is broadcast along it, so never loaded in packets.

    Where some parameter is gathered, none is summed like that, and one that has packets is as large as x.
    """
    if gathers:
        return ("STORES",) if form == "PACKETS" else ("STORES", "SUMS")
    return ("STORES", "SUMS", "SUMS_ROWS") if form == "UNIFORM" else ("STORES", "SUMS")


def _finishing(stored: Sequence[Storage], sizes: Sequence[bool]) -> Iterator[Variant]:
    """Every instance of the kernel that finishes sums."""
    for arithmetic in sorted({one.result.arithmetic for one in stored if one.result.is_floating}):
        for large in sizes:
            yield Variant(None, "sum_partials", "", "", "", arithmetic, large=large)
