"""Rows that are no whole packets: x and the result walked as one stretch of memory, along which the parameters repeat.

A row of 1,023 elements begins at a packet of 8 only every eighth time. So a thread keeps its place in a *period* of whole packets,
eight rows there, finds its elements of the parameters once, and goes from period to period.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ._layout import Ints, Layout
from ._plan import Described, Storage, is_large

__all__ = ["Repeat", "find_repeat"]


class Repeat(NamedTuple):
    """How a call repeats."""

    forms: dict[int, str]  # enum Form of each tensor
    period: int  # elements after which the gathered tensors have their first ones again; whole packets
    extents: Ints  # of the dims that lead from an element to the gathered ones; the last of them only counts repeats
    elements: int  # of the result


def find_repeat(
    layout: Layout, tensors: Sequence[tuple[int, Described]], full: Sequence[int], stored: Storage, sums: Sequence[Ints] = ()
) -> Repeat | None:
    """Return how packets can be walked whatever the width of the rows, None where that cannot be.

    Parameters
    ----------
    layout
        Of the call.
    tensors
        What is read or written by its place in the layout, the result or its gradient first.
    full
        Places of those that must lie one element after the other.
    stored
        How they are stored.
    sums
        For each gradient that is summed, marks along the dims, 1 where it is.

    See Also
    --------
    cupyfused._sums.plan_repeats : The sums of gradients over what repeats.
    """
    packet, extents = stored.packet, layout.extents
    if stored.x == "any_dtype" or not stored.result.is_floating or packet == 1 or is_large(layout, 1) or extents[0] < packet:
        return None
    one_after_another = tuple(math.prod(extents[:dim]) for dim in range(len(extents)))
    forms = {k: _form(one, layout.strides[k], one_after_another, packet) for k, one in tensors}
    moving = [layout.strides[k] for k, form in forms.items() if form == "GATHERED"]
    if forms[0] == "GATHERED" or any(forms[k] != "PACKETS" for k in full) or not moving or not all(map(_is_one_stretch, sums)):
        return None
    kept = [dim for dim in range(len(extents)) if any(own[dim] for own in moving) or any(not marks[dim] for marks in sums)]
    inner = math.prod(extents[: kept[-1] + 1])
    return Repeat(forms, inner * (packet // math.gcd(inner, packet)), extents[: kept[-1] + 2], math.prod(extents))


def _form(one: Described, strides: Ints, one_after_another: Ints, packet: int) -> str:
    if not any(strides):
        return "UNIFORM"
    assert one.dtype is not None
    is_aligned = one.alignment % (packet * one.dtype.size) == 0
    return "PACKETS" if strides == one_after_another and is_aligned else "GATHERED"


def _is_one_stretch(marks: Ints) -> bool:
    """Whether the dims that a gradient keeps are neighbours."""
    kept = [dim for dim, mark in enumerate(marks) if not mark]
    return not kept or kept[-1] - kept[0] + 1 == len(kept)
