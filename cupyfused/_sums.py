"""How one pass over memory sums gradients: which dims a block holds, which it walks, and what each gradient makes of them.

Pure arithmetic, like `_layout`. The words are those of `cuda_src/elementwise.cuh`: the dims of an iteration fall into *position*
(dim 0, or none), *loop* and *grid*; a gradient's role follows from which of them it is summed over.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ._source import BLOCK, RESIDENT

__all__ = ["Role", "SumLayout", "plan_repeats", "plan_sums"]

Ints = tuple[int, ...]


class Role(enum.IntEnum):
    """What a gradient does with the sums of a block; the numbers are those of `enum Role` in elementwise.cuh."""

    UNWANTED = 0
    EACH = 1
    COLUMN = 2
    ALL = 3
    ROW = 4


@dataclass(frozen=True)
class SumLayout:
    """One pass. `order` lists the collapsed dims as the kernel wants them: position, loop, grid."""

    order: Ints
    has_position: bool
    loop_end: int  # how many of `order` are position or loop
    position_lanes: int
    positions: int  # packets along the position
    tiles: int
    loop: int
    splits: int
    loop_per_split: int
    grid: int
    roles: tuple[Role, ...]

    @property
    def blocks(self) -> int:
        return self.grid * self.tiles * self.splits

    def partial_extents(self, gradient: int, extents: Ints, inner: int) -> dict[str | int, int]:
        """Return the dims of a gradient's partial sums, outermost first: collapsed dims by number, and "split" and "tile"."""
        role = self.roles[gradient]
        dims: dict[str | int, int] = {dim: extents[dim] for dim in reversed(self.order[self.loop_end :])}
        if role is Role.ROW:
            dims |= {dim: extents[dim] for dim in reversed(self.order[1 : self.loop_end])}
        else:
            dims["split"] = self.splits
        if role is Role.COLUMN:
            dims[0] = inner
        else:
            dims["tile"] = self.tiles
        return dims


@dataclass(frozen=True)
class _Work:
    """What is shared out among blocks: `plan_sums` says what these are."""

    extents: Ints
    width: int
    items: int
    summed: Sequence[Ints | None]
    resident: int  # blocks that run at once

    @property
    def workspace_limit(self) -> int:
        return max(math.prod(self.extents) // _WORKSPACE_SHARE, _WORKSPACE_FREE)


_MAX_ENUMERATED = 8
# What starting and finishing a block costs, in turns of its loop: a turn waits for memory, and blocks wait side by side. With 4,
# the gradients of 2^16 and 2^18 elements took 4.9 and 5.4 us in a CUDA graph on an H200, with 1 4.2 and 4.5.
_BLOCK_OVERHEAD = 1
# A warp along the position reads 512 neighbouring bytes in packets, and a block as many one by one: less, and each row of a block
# begins and ends within a sector of memory that another block has a part of. More lanes only mean fewer rows to a block, more
# splits, and so more partial sums.
_MAX_LANES = 32
_MAX_LANES_OF_SINGLES = BLOCK
# Partial sums may take 1/128 of the elements (in float32: at most 1 % of what a call holds anyway), or a megabyte; a gradient
# that would need more gets a pass of its own.
_WORKSPACE_SHARE = 128
_WORKSPACE_FREE = 1 << 18


def plan_sums(extents: Ints, width: int, items: int, summed: Sequence[Ints | None], multiprocessors: int) -> list[SumLayout]:
    """Return the passes, one wherever possible, that sum all gradients.

    Parameters
    ----------
    extents
        The collapsed dims in elements, innermost first.
    width, items
        Elements in a packet, packets that a thread takes in one turn.
    summed
        For each gradient a mark along each dim, 1 where it is summed; None if it is not wanted.
    multiprocessors
        Of the device; the number of blocks follows from it.
    """
    wanted = [k for k, marks in enumerate(summed) if marks is not None]
    for count in range(len(wanted), 0, -1):
        for group in itertools.combinations(wanted, count):
            chosen = [marks if k in group else None for k, marks in enumerate(summed)]
            layout = _best(_Work(extents, width, items, chosen, multiprocessors * RESIDENT))
            if layout is not None:
                rest = [None if k in group else marks for k, marks in enumerate(summed)]
                return [layout, *plan_sums(extents, width, items, rest, multiprocessors)]
    return []


def plan_repeats(extents: Ints, width: int, summed: Sequence[Ints | None], multiprocessors: int) -> SumLayout | None:
    """Return the pass whose position is a period and whose loop goes over them, None if its partial sums would not stay small.

    The parameters are those of `plan_sums`, `extents` the elements of a period and how many there are, the last one maybe in part.
    """
    rows = min(1 << (extents[1] - 1).bit_length(), BLOCK // _MAX_LANES)  # no more than there are periods for
    work = _Work(extents, width, 1, summed, multiprocessors * RESIDENT)
    layout = _assign(work, True, (1,), BLOCK // rows)
    assert layout is not None  # a gradient keeps the period or nothing
    return None if Role.COLUMN in layout.roles and layout.splits * extents[0] > work.workspace_limit else layout


def _best(work: _Work) -> SumLayout | None:
    best, best_cost = None, math.inf
    for has_position in (True, False):
        for loop in _loop_candidates(work):
            layout = _assign(work, has_position, loop)
            if layout is None:
                continue
            cost = _cost(work, layout)
            if cost < best_cost:
                best, best_cost = layout, cost
    return best


def _loop_candidates(work: _Work) -> list[Ints]:
    """Every subset of the outer dims; with very many dims only those that some gradient asks for."""
    outer = range(1, len(work.extents))
    if len(outer) <= _MAX_ENUMERATED:
        return [dims for count in range(len(outer) + 1) for dims in itertools.combinations(outer, count)]
    summed = [marks for marks in work.summed if marks is not None]
    asked = {tuple(dim for dim in outer if marks[dim]) for marks in summed}
    common = tuple(dim for dim in outer if all(marks[dim] for marks in summed if any(marks)))
    return [*asked, common, tuple(outer), ()]


def _assign(work: _Work, has_position: bool, loop: Ints, most: int | None = None) -> SumLayout | None:
    """Share the iteration out among as many blocks as are resident, or more if its dims ask for more."""
    extents, width = work.extents, work.width
    roles = tuple(_role(marks, has_position, loop) for marks in work.summed)
    if None in roles:
        return None
    packets = -(-extents[0] // width)
    positions = packets if has_position else 1
    if most is None:
        most = _MAX_LANES if width > 1 or Role.ROW in roles else _MAX_LANES_OF_SINGLES  # a ROW sums across a warp
    lanes = min(most, 1 << (positions - 1).bit_length())
    tiles = -(-positions // lanes)
    grid_dims = tuple(dim for dim in range(1, len(extents)) if dim not in loop)
    grid = math.prod(extents[dim] for dim in grid_dims)
    steps = math.prod(extents[dim] for dim in loop) * (1 if has_position else packets)
    turn = BLOCK // lanes * work.items  # loop indices that a block takes in one turn
    # One wave: each block has its share from the start, and none waits for a wave that is not full. With two to three waves the
    # gradients of (32768, 4096) in bfloat16 reached 79 % of the floor on an H200, with one 92 %.
    wished = work.resident // (grid * tiles)
    if Role.COLUMN in roles:
        wished = min(wished, work.workspace_limit // (grid * extents[0]))
    splits = max(1, min(wished, steps // (turn * _BLOCK_OVERHEAD)))
    per_split = -(-steps // splits)
    per_split = -(-per_split // turn) * turn
    return SumLayout(
        order=(0, *loop, *grid_dims),
        has_position=has_position,
        loop_end=1 + len(loop),
        position_lanes=lanes,
        positions=positions,
        tiles=tiles,
        loop=steps,
        splits=-(-steps // per_split),
        loop_per_split=per_split,
        grid=grid,
        roles=tuple(role for role in roles if role is not None),
    )


def _role(marks: Ints | None, has_position: bool, loop: Ints) -> Role | None:
    """Return a gradient's role under an assignment, None if the kernel cannot sum it that way."""
    if marks is None:
        return Role.UNWANTED
    if not any(marks):
        return Role.EACH
    whole_loop = all(marks[dim] for dim in loop)
    if not has_position:
        return Role.ALL if marks[0] and whole_loop else None
    if not marks[0]:
        return Role.COLUMN if whole_loop else None
    return Role.ALL if whole_loop else Role.ROW


def _cost(work: _Work, layout: SumLayout) -> float:
    """Estimate the pass, in packets that all threads have a turn for; infinite if the partial sums would not stay small."""
    blocks = -(-layout.blocks // work.resident) * work.resident
    alone = sum(marks is not None for marks in work.summed) == 1
    turns = -(-layout.loop_per_split // (BLOCK // layout.position_lanes * work.items))
    of_a_turn = blocks * BLOCK * work.items
    cost: float = of_a_turn * (turns + _BLOCK_OVERHEAD)
    for k, role in enumerate(layout.roles):
        if role in (Role.UNWANTED, Role.EACH):
            continue
        partial = layout.partial_extents(k, work.extents, work.extents[0])
        size = math.prod(partial.values())
        if size > work.workspace_limit and not alone:
            return math.inf
        cost += 4 * size / work.width
        if role is Role.ROW:  # shuffles in every turn
            cost += of_a_turn * turns / 4
    return cost
