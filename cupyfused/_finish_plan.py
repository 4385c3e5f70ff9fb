"""The plan of the launch that finishes the sums of gradients: what blocks have summed in part is added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ._launch import Launch, Launcher
from ._layout import Ints
from ._parameters import fill_dims, fill_divider, partials_struct
from ._plan import Backend, Described
from ._source import BLOCK, SUMS_AT_ONCE, Variant

__all__ = ["Partial", "plan_finish"]


class Partial(NamedTuple):
    """The partial sums of one gradient; how they lie is said in sum_partials.cuh."""

    gradient: int  # which one
    described: Described
    kept: list[tuple[int, int]]  # (extent, stride in the gradient) a dim, innermost first
    reduced: int
    inner: int = 1


_SUMS_A_THREAD = 8  # their loads are under way together


def _column_bits(kept: int, reduced: int) -> int:
    """Kept elements, as a power of two, that a block of the finishing kernel takes: as many as leave each thread few sums."""
    bits = min(BLOCK.bit_length() - 1, (kept - 1).bit_length())
    while bits > 0 and reduced << bits > _SUMS_A_THREAD * BLOCK:
        bits -= 1
    return bits


def plan_finish(backend: Backend, arithmetic: str, large: bool, partials: Sequence[Partial]) -> tuple[tuple[Launch, Ints], ...]:
    """Return launches, each with the gradients that it finishes; one takes the addresses of sums and gradient for each of them."""
    if not partials:
        return ()
    launcher = backend.load(Variant(None, "sum_partials", "", "", "", arithmetic, large=large))
    groups = [partials[begin : begin + SUMS_AT_ONCE] for begin in range(0, len(partials), SUMS_AT_ONCE)]
    return tuple((_launch(launcher, large, group), tuple(one.gradient for one in group)) for group in groups)


def _launch(launcher: Launcher, large: bool, group: Sequence[Partial]) -> Launch:
    parameters = partials_struct(large)()
    blocks = 1
    for target, one in zip(parameters.gradient, group):
        extents = [extent for extent, _ in one.kept]
        assert one.described.dtype is not None
        target.kept, target.reduced, target.inner = math.prod(extents), one.reduced, one.inner
        fill_divider(target.inner_divider, one.inner)
        target.column_bits = _column_bits(target.kept, target.reduced)
        target.ndim, target.dtype = len(extents), one.described.dtype.code
        fill_dims(target.dim, extents)
        for dim, (_, stride) in zip(target.dim, one.kept):
            dim.stride[0] = stride
        blocks = max(blocks, -(-target.kept >> target.column_bits))
    return Launch(launcher, (blocks, len(group)), bytes(parameters), "QQ" * len(group))
