"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import rich.box
import rich.console
import rich.table

from .results import FORWARD, TRAINING, Results, Timing
from .sections import FRESH, WALL

__all__ = ["print_results", "readable"]

Name = Callable[[Timing], str]

_ON_GPU = "GPU time,\nforward / forward + backward"


def readable(seconds: float) -> str:
    """Return a time in the unit that suits it.

    Examples
    --------
    >>> readable(0.0000123), readable(0.25), readable(12)
    ('12.3 µs', '250 ms', '12.0 s')
    """
    unit, value = ("s", seconds) if seconds >= 1 else ("ms", 1e3 * seconds) if seconds >= 1e-3 else ("µs", 1e6 * seconds)
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def print_results(results: Results, console: rich.console.Console) -> None:
    """Print every section's tables, then what was absent, and what was not timed and why."""
    for title, table in _tables(results):
        console.print(f"\n{title}", style="italic", soft_wrap=True)
        console.print(table)
    for absent in results.absent:
        console.print(f"Absent: {absent.what}: {absent.why}", soft_wrap=True)
    for one in results.untimed:
        where = ", ".join(filter(None, (one.section, one.case, one.dtype)))
        console.print(f"Not timed: {one.peer} ({where}): {one.problem}", soft_wrap=True)


def _tables(results: Results) -> Iterator[tuple[str, rich.table.Table]]:
    both = f"{FORWARD} / {TRAINING}"
    for dtype in _distinct(one.dtype for one in results.of("layouts")):
        rows = [one for one in results.of("layouts") if one.dtype == dtype]
        yield f"Layouts, {dtype}: share of a copy's rate at the same bytes, {both}", _pivot(rows, _case, _peer, _share)
    for section, name in (("latency", "Latency"), ("cpu", "CPU")):
        for case in _distinct(one.case for one in results.of(section)):
            rows = [one for one in results.of(section) if one.case == case]
            yield f"{name}, {case}: wall time of an iteration, {both}, by elements", _pivot(rows, _size, _peer, _time)
    if rows := results.of("host"):
        yield "Host: its time for a call on 1,024 floats", _pivot(rows, _peer, _step, _time)
    if rows := results.of("cold"):
        yield "Cold start, each in a fresh process", _pivot(rows, lambda one: f"{one.peer}, {one.case}", _step, _time)
    peers = results.of("peers")
    for case in _distinct(one.case for one in peers if one.case != FRESH):
        rows = [one for one in peers if one.case == case]
        is_small = any(one.step == WALL for one in rows)
        rows += [one for one in peers if one.case == FRESH and is_small]
        yield f"Peers, {case}: clamp(x * scale + bias, 0, 1)", _pivot(rows, _peer, _column, _time if is_small else _time_and_share)


def _case(one: Timing) -> str:
    return one.case


def _peer(one: Timing) -> str:
    return one.peer


def _step(one: Timing) -> str:
    return one.step


def _column(one: Timing) -> str:
    return _ON_GPU if one.step in (FORWARD, TRAINING) else one.step


def _size(one: Timing) -> str:
    return f"{one.elements:,}"


def _time(one: Timing) -> str:
    return "" if one.seconds is None else readable(one.seconds)


def _share(one: Timing) -> str:
    return "" if one.share is None else f"{one.share:.0%}"


def _time_and_share(one: Timing) -> str:
    return _time(one) if one.share is None else f"{_time(one)} ({one.share:.0%})"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _pivot(timings: list[Timing], row: Name, column: Name, cell: Name) -> rich.table.Table:
    """Make a table of one row and one column for each distinct name, in the order in which they come; equal places share a cell."""
    columns = _distinct(map(column, timings))
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    cells: dict[tuple[str, str], list[str]] = {}
    for one in timings:
        cells.setdefault((row(one), column(one)), []).append(cell(one))
    for name in _distinct(map(row, timings)):
        table.add_row(name, *(" / ".join(cells.get((name, other), [])) for other in columns))
    return table
