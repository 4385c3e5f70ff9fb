"""How one pass sums gradients: the kernel's walk is done here over every index, and its sums are added up and compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cupyfused import _sums
from cupyfused._source import BLOCK
from cupyfused._sums import Role, SumLayout, plan_sums

Ints = tuple[int, ...]
Marks = Ints | None


@dataclass(frozen=True)
class Case:
    """The arguments of `plan_sums`."""

    extents: Ints
    width: int
    items: int
    summed: tuple[Marks, ...]
    multiprocessors: int

    def plan(self) -> list[SumLayout]:
        return plan_sums(self.extents, self.width, self.items, self.summed, self.multiprocessors)


@st.composite
def cases(draw: st.DrawFn, extents: st.SearchStrategy[list[int]], multiprocessors: int) -> Case:
    shape = draw(extents)
    width = draw(st.sampled_from([1, 2, 4, 8]))
    if len(shape) > 1:
        shape[0] *= width  # packets are whole, unless dim 0 is all there is
    marks = st.tuples(*(st.integers(0, 1) for _ in shape))
    summed = draw(st.lists(st.none() | marks | st.just((0,) * len(shape)), min_size=1, max_size=4))
    return Case(tuple(shape), width, draw(st.integers(1, 4)), tuple(summed), draw(st.integers(1, multiprocessors)))


SMALL = st.lists(st.sampled_from([1, 2, 3, 5, 8, 17]), min_size=1, max_size=4).filter(lambda extents: math.prod(extents) <= 700)
LONG = st.lists(st.integers(200, 3000), min_size=1, max_size=1) | st.lists(st.integers(2, 60), min_size=2, max_size=2)
MANY = st.lists(st.sampled_from([1, 2, 2]), min_size=9, max_size=11)
LARGE = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=5) | st.lists(st.integers(2, 9), min_size=9, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def _little_workspace() -> Iterator[None]:
    """Let the limit of the workspace bite on arrays that can be walked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sums, "_WORKSPACE_FREE", 24)
        yield


# ---- the walk of the kernel ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """What one block does in one turn: for each element its step of the loop and its index along the collapsed dims."""

    block: int
    step: np.ndarray
    index: dict[str | int, np.ndarray]

    def place(self, keys: Sequence[str | int]) -> tuple[np.ndarray, ...]:
        return tuple(self.index[key] for key in keys)


def decompose(index: np.ndarray, extents: Sequence[int]) -> list[np.ndarray]:
    """Take a count over dims apart, innermost first; the last dim keeps what is left, as in `add_offsets`."""
    places = []
    for dim, extent in enumerate(extents):
        places.append(index % extent if dim + 1 < len(extents) else index)
        index = index // extent
    return places


def walk(one: SumLayout, extents: Ints, width: int, items: int) -> Iterator[Visit]:
    """Visit the elements as the threads of `elementwise.cuh` do."""
    kernel_extents = [-(-extents[dim] // width) if dim == 0 else extents[dim] for dim in one.order]
    begin, end = int(one.has_position), one.loop_end
    thread = np.arange(BLOCK)
    lane, row, rows = thread % one.position_lanes, thread // one.position_lanes, BLOCK // one.position_lanes
    for block in range(one.blocks):
        split, x = divmod(block, one.grid * one.tiles)
        tile = x % one.tiles
        grid = decompose(np.array(x // one.tiles), kernel_extents[end:])
        position = tile * one.position_lanes + lane
        stop = min(one.loop, (split + 1) * one.loop_per_split)
        for turn in range(split * one.loop_per_split, stop, rows * items):
            for item in range(items):
                step = turn + item * rows + row
                takes = (step < stop) & (position < one.positions)
                index: dict[str | int, np.ndarray] = dict(
                    zip(one.order[begin:end], decompose(step[takes], kernel_extents[begin:end]))
                )
                fixed = {"split": split, "tile": tile} | dict(zip(one.order[end:], grid))
                index |= {key: np.full(takes.sum(), at) for key, at in fixed.items()} | {"step": step[takes]}
                if one.has_position:
                    index[0] = position[takes]
                # Each packet is `width` elements, cut short at the end of dim 0.
                spread = {key: np.repeat(at, width) for key, at in index.items()}
                spread[0] = spread[0] * width + np.tile(np.arange(width), takes.sum())
                index = {key: at[spread[0] < extents[0]] for key, at in spread.items()}
                yield Visit(block, index.pop("step"), index)


@given(cases(SMALL, 6) | cases(LONG, 40) | cases(MANY, 3))
@settings(max_examples=120, deadline=None)
def test_every_element_is_visited_once(case: Case) -> None:
    for one in case.plan():
        seen = np.zeros(case.extents, dtype=int)
        for visit in walk(one, case.extents, case.width, case.items):
            np.add.at(seen, visit.place(range(len(case.extents))), 1)
        assert (seen == 1).all()


@given(cases(SMALL, 6) | cases(LONG, 40) | cases(MANY, 3))
@settings(max_examples=150, deadline=None)
def test_partial_sums_add_up_to_the_gradient(case: Case) -> None:
    values = np.random.default_rng().integers(1, 100, case.extents)
    for one in case.plan():
        for gradient, (role, marks) in enumerate(zip(one.roles, case.summed)):
            if role is Role.UNWANTED or marks is None:
                continue
            if role is Role.EACH:
                assert not any(marks)
                continue
            partial = one.partial_extents(gradient, case.extents, case.extents[0])
            sums = np.zeros(tuple(partial.values()), dtype=int)
            writers = np.full(sums.shape, -1)
            for visit in walk(one, case.extents, case.width, case.items):
                where = visit.place(list(partial))
                np.add.at(sums, where, values[visit.place(range(len(case.extents)))])
                # A block stores a sum once at its end, and those along the loop once a step.
                writer = visit.block * one.loop + (visit.step if role is Role.ROW else 0 * visit.step)
                free = writers[where] == -1
                writers[where] = np.where(free, writer, writers[where])
                assert (writers[where] == writer).all(), "one place would be written twice"
            assert (writers >= 0).all(), "a partial sum would never be written"
            assert_finished(sums, list(partial), values, marks)


def assert_finished(sums: np.ndarray, keys: Sequence[str | int], values: np.ndarray, marks: Ints) -> None:
    """Add what is left, as `sum_partials` does, and compare with the sum over the marked dims."""
    left = tuple(axis for axis, key in enumerate(keys) if isinstance(key, str) or marks[key])
    kept = [key for key in keys if isinstance(key, int) and not marks[key]]
    finished = sums.sum(left).transpose(np.argsort(kept).tolist()) if kept else sums.sum(left)
    # A marked dim that the partial sums no longer have was added up inside a block.
    assert np.array_equal(finished, values.sum(tuple(dim for dim, mark in enumerate(marks) if mark)))


# ---- properties of a plan, for any size ---------------------------------------------------------------------------------


@given(cases(SMALL, 6) | cases(LONG, 40) | cases(MANY, 3) | cases(LARGE, 160))
@settings(max_examples=200, deadline=None)
def test_every_wanted_gradient_has_one_role(case: Case) -> None:
    passes = case.plan()
    for gradient, marks in enumerate(case.summed):
        roles = [one.roles[gradient] for one in passes if one.roles[gradient] is not Role.UNWANTED]
        assert len(roles) == (marks is not None)
        if marks is not None:
            assert (roles[0] is Role.EACH) == (not any(marks))
    assert all(any(role is not Role.UNWANTED for role in one.roles) for one in passes), "a pass for nothing"


@given(cases(SMALL, 6) | cases(LONG, 40) | cases(LARGE, 160))
@settings(max_examples=200, deadline=None)
def test_blocks_share_out_the_whole_iteration(case: Case) -> None:
    packets = -(-case.extents[0] // case.width)
    for one in case.plan():
        assert sorted(one.order) == list(range(len(case.extents)))
        assert one.order[0] == 0
        assert (one.splits - 1) * one.loop_per_split < one.loop <= one.splits * one.loop_per_split
        assert one.loop_per_split % (BLOCK // one.position_lanes * case.items) == 0, "splits would share a turn"
        assert one.position_lanes in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        assert one.position_lanes <= 32 or (case.width == 1 and Role.ROW not in one.roles), "a row would be summed across warps"
        assert (one.tiles - 1) * one.position_lanes < one.positions <= one.tiles * one.position_lanes
        assert one.positions == (packets if one.has_position else 1)
        assert one.grid * one.loop * one.positions == packets * math.prod(case.extents[1:])


@given(cases(SMALL, 6) | cases(LONG, 40) | cases(LARGE, 160))
@settings(max_examples=200, deadline=None)
def test_partial_sums_stay_small_unless_a_gradient_is_alone(case: Case) -> None:
    limit = max(math.prod(case.extents) // _sums._WORKSPACE_SHARE, _sums._WORKSPACE_FREE)
    for one in case.plan():
        wanted = [gradient for gradient, role in enumerate(one.roles) if role is not Role.UNWANTED]
        for gradient in wanted:
            if one.roles[gradient] is not Role.EACH and len(wanted) > 1:
                assert math.prod(one.partial_extents(gradient, case.extents, case.extents[0]).values()) <= limit


COMMON = {
    "per channel of NCHW": ((4096, 256, 64), [(0, 0, 0), (1, 0, 1), (1, 0, 1)]),
    "along the last dim": ((4096, 32768), [(0, 0), (0, 1), (0, 1)]),
    "one value a sample": ((1 << 16, 512), [(0, 0), (1, 0), (1, 0)]),
    "one value for all": ((1 << 24,), [(0,), (1,), (1,)]),
    "modulation of tokens": ((1152, 256, 64), [(0, 0, 0), (0, 1, 0), (0, 1, 0)]),
    "rows and columns": ((2048, 2048), [(0, 0), (0, 1), (1, 0)]),
}


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize(("width", "items"), [(8, 1), (4, 1), (1, 4)])
def test_common_shapes_take_one_pass_that_keeps_a_device_busy(
    monkeypatch: pytest.MonkeyPatch, name: str, width: int, items: int
) -> None:
    monkeypatch.setattr(_sums, "_WORKSPACE_FREE", 1 << 18)
    extents, summed = COMMON[name]
    for asked in itertools.product([True, False], repeat=len(summed)):
        if any(asked):
            passes = plan_sums(extents, width, items, [marks if one else None for marks, one in zip(summed, asked)], 132)
            assert len(passes) == 1
            assert passes[0].blocks >= 132
