"""Division by multiplication and shift, as kernels do it for indices below 2**31."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from cupyfused._layout import divider

LIMIT = 1 << 31


def divides(extent: int, numbers: np.ndarray) -> bool:
    magic, shift = divider(extent)
    return bool(np.array_equal(numbers * np.uint64(magic) >> np.uint64(shift), numbers // np.uint64(extent)))


def hardest(extent: int) -> int:
    """The largest n below 2**31 whose remainder is extent - 1: what rounding the magic number up adds grows with n, and the room
    for it is smallest there, so that a divider right for this n (and exact for multiples) is right for all."""
    return (LIMIT - extent) // extent * extent + extent - 1


def edges_of_extent() -> Iterator[int]:
    for bits in range(32):
        yield from (extent for extent in range((1 << bits) - 2, (1 << bits) + 3) if 1 <= extent < LIMIT)
    yield from (LIMIT - 1 - k for k in range(2000))
    yield from (LIMIT // k + more for k in range(1, 500) for more in (-1, 0, 1) if 1 <= LIMIT // k + more < LIMIT)


def test_divider_over_every_small_number_and_extent() -> None:
    numbers = np.arange(1 << 14, dtype=np.uint64)
    for extent in range(1, 1025):
        assert divides(extent, numbers), extent


def test_divider_at_multiples_near_the_limit() -> None:
    top = np.arange(LIMIT - 4096, LIMIT, dtype=np.uint64)
    for extent in range(1, 1025):
        assert divides(extent, top), extent


def test_divider_of_every_extent_where_rounding_is_tightest() -> None:
    chosen = [*range(1, 1 << 15), *edges_of_extent(), *(random.randrange(1, LIMIT) for _ in range(20_000))]
    for extent in chosen:
        magic, shift = divider(extent)
        assert magic < 1 << 32 and shift < 64, f"{extent}: the kernel keeps 32 bits of the magic number and multiplies in 64"
        assert magic * extent >= 1 << shift, f"{extent}: a reciprocal rounded down fails at multiples"
        for n in {0, extent - 1, extent, hardest(extent), hardest(extent) - extent + 1, LIMIT - 1} - {LIMIT}:
            assert n * magic >> shift == n // extent, f"{n} / {extent}"
