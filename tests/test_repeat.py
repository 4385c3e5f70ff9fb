"""What repeats along x: every element is visited once, and its sums add up; and an x that is cut inside its elements."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from cupyfused import fused_scale_bias
from cupyfused._source import BLOCK
from cupyfused._sums import Role, SumLayout, plan_repeats


@dataclass(frozen=True)
class Case:
    """Rows of `inner` dims, innermost first, of which a gradient keeps those from `begin` to `end`."""

    inner: tuple[int, ...]
    rows: int
    begin: int
    end: int
    width: int
    multiprocessors: int

    @property
    def period(self) -> int:
        return math.lcm(math.prod(self.inner), self.width)

    @property
    def elements(self) -> int:
        return math.prod(self.inner) * self.rows

    def plan(self) -> SumLayout | None:
        """The pass for three gradients: of full size, of the kept dims, of one number."""
        periods = -(-self.elements // self.period)
        return plan_repeats((self.period, periods), self.width, [(0, 0), (0, 1), (1, 1)], self.multiprocessors)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    inner = tuple(draw(st.lists(st.integers(2, 9), min_size=1, max_size=3)))
    begin = draw(st.integers(0, len(inner) - 1))
    end = draw(st.integers(begin + 1, len(inner)))
    return Case(inner, draw(st.integers(2, 90)), begin, end, draw(st.sampled_from([2, 4, 8])), draw(st.integers(1, 6)))


def walk(case: Case, one: SumLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the elements that the threads of the backward kernel visit, and for each the split and the place of its sum."""
    packets, tail = divmod(case.elements, case.width)
    thread = np.arange(BLOCK)
    lane, row, rows = thread % one.position_lanes, thread // one.position_lanes, BLOCK // one.position_lanes
    visited = []
    for split in range(one.splits):
        stop = min(one.loop, (split + 1) * one.loop_per_split)
        for tile in range(one.tiles):
            position = tile * one.position_lanes + lane
            for turn in range(split * one.loop_per_split, stop, rows):
                step = turn + row
                packet = step * one.positions + position
                takes = (position < one.positions) & (step < stop) & (packet < packets)
                e = np.arange(case.width)
                element, place = (at[takes][:, None] * case.width + e for at in (packet, position))
                visited.append((element.ravel(), np.full(element.size, split), place.ravel()))
            for first in row[(position == packets % one.positions) & (split == 0)]:
                e = np.arange(first, tail, rows)
                visited.append((packets * case.width + e, 0 * e, packets % one.positions * case.width + e))
    element, split_of, place = (np.concatenate(part) for part in zip(*visited))
    return element, split_of, place


@given(cases())
@settings(max_examples=150, deadline=None)
def test_repeats_add_up(case: Case) -> None:
    one = case.plan()
    assume(one is not None)
    assert one is not None and one.roles == (Role.EACH, Role.COLUMN, Role.ALL)
    element, split, place = walk(case, one)
    assert np.array_equal(np.sort(element), np.arange(case.elements)), "an element is left out, or visited twice"
    values = np.random.default_rng().integers(1, 100, case.elements)
    sums = np.zeros((one.splits, case.period), dtype=int)
    np.add.at(sums, (split, place), values[element])
    # As sum_partials.cuh finds them.
    inner, kept = math.prod(case.inner[: case.begin]), math.prod(case.inner[case.begin : case.end])
    r, k = np.arange(sums.size // kept), np.arange(kept)[:, None]
    found = sums.ravel()[(r // inner * kept + k) * inner + r % inner].sum(1)
    outer = math.prod(case.inner[case.end :]) * case.rows
    assert np.array_equal(found, values.reshape(outer, kept, inner).sum((0, 2)))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_blocks_have_as_many_rows_as_there_are_periods(case: Case) -> None:
    one = case.plan()
    assume(one is not None)
    assert one is not None
    rows = BLOCK // one.position_lanes
    assert rows == 1 or rows // 2 < -(-case.elements // case.period) or one.positions <= one.position_lanes
    assert one.splits * one.loop_per_split >= one.loop and one.tiles * one.position_lanes >= one.positions


@pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are built for the CPU by g++")
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_an_array_that_begins_inside_an_element(dtype: str, offset: int) -> None:
    """As fields of packed records do; a GPU would refuse to load such an element, a CPU does."""
    values = np.random.default_rng().integers(-9, 9, 64).astype(dtype)
    x = np.frombuffer(bytes(offset) + values.tobytes(), dtype=dtype, offset=offset)
    found = fused_scale_bias(x, 2, 1, impl="host")
    np.testing.assert_array_equal(found, values * 2 + 1)
