"""Results as pictures: achieved rates beside a copy's, times over sizes with the crossover, and bars of all peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from .report import readable
from .results import FORWARD, TRAINING, Results, Timing
from .sections import WALL

__all__ = ["compared", "crossover", "draw"]

# Colours that the colour-blind tell apart, and signs for prints without colour.
_STYLES = {
    "composed torch": ("#e69f00", "s"),
    "torch.compile": ("#009e73", "^"),
    "cupyfused": ("#1f3b73", "o"),
    "NumPy": ("#e69f00", "s"),
    "cupyfused, NumPy arrays": ("#1f3b73", "o"),
}
_OTHER, _OURS, _COPY = "#8c8c8c", "#1f3b73", "#c0392b"
_STEPS = (FORWARD, TRAINING)
_NOISE = 1.03  # medians that are nearer than this are the same


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw what was measured into a folder and return the files.

    `roofline-<dtype>.png` shows the layouts, `sizes.png` and `sizes-cpu.png` time over size, `peers.png` all peers.
    """
    figures: dict[str, Figure] = {}
    for dtype in _distinct(one.dtype for one in results.of("layouts")):
        figures[f"roofline-{dtype}"] = _roofline([one for one in results.of("layouts") if one.dtype == dtype], _of(results, dtype))
    for section, name in (("latency", "sizes"), ("cpu", "sizes-cpu")):
        if timings := results.of(section):
            figures[name] = _sizes(timings, _of(results, "float32"))
    if timings := results.of("peers"):
        figures["peers"] = _peers(timings, _of(results, "float32"))
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _of(results: Results, dtype: str) -> str:
    processor = results.machine.get("GPU", results.machine.get("processor", ""))
    return f"{processor}, {dtype}, PyTorch {results.versions.get('PyTorch', '')}"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _style(peer: str) -> tuple[str, str]:
    return _STYLES.get(peer, (_OTHER, "D"))


# ---- layouts ------------------------------------------------------------------------------------------------------------


def _roofline(timings: Sequence[Timing], subtitle: str) -> Figure:
    """Mark each peer's rate in each layout; the line is the rate of a copy of as many bytes, which nothing passes."""
    layouts = _distinct(one.case for one in timings)
    figure = Figure(figsize=(12, 1.8 + 0.36 * len(layouts)), layout="constrained")
    figure.suptitle(f"Rate at which the bytes that must move are moved\n{subtitle}")
    for axes, step in zip(figure.subplots(1, 2, sharey=True), _STEPS):
        rows = [one for one in timings if one.step == step and one.seconds and one.floor]
        for place, layout in enumerate(layouts):
            floors = [one.moved / one.floor / 1e9 for one in rows if one.case == layout and one.floor]
            axes.vlines(
                floors[:1], place - 0.4, place + 0.4, colors=_COPY, linewidth=2.5, label="copy kernel" if not place else None
            )
        for peer in _distinct(one.peer for one in rows):
            points = [(one.moved / one.seconds / 1e9, layouts.index(one.case)) for one in rows if one.peer == peer and one.seconds]
            colour, marker = _style(peer)
            axes.plot(*zip(*points), marker, color=colour, label=peer, markersize=7)
        axes.set(title=step, xlabel="GB/s", xlim=(0, None), ylim=(len(layouts) - 0.4, -0.6))
        axes.set_yticks(range(len(layouts)), layouts)
        axes.grid(axis="both", alpha=0.25)
    _shared_legend(figure)
    return figure


def _shared_legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


# ---- sizes --------------------------------------------------------------------------------------------------------------


def crossover(ours: dict[int, float], other: dict[int, float]) -> int | None:
    """Return the smallest common size from which on the other is slower, by more than noise; None where it is not at the largest.

    Examples
    --------
    >>> crossover({1: 5.0, 2: 5.0, 4: 5.0}, {1: 3.0, 2: 6.0, 4: 12.0})
    2
    """
    first = None
    for size in sorted(ours.keys() & other.keys(), reverse=True):
        if other[size] <= _NOISE * ours[size]:
            break
        first = size
    return first


def _sizes(timings: Sequence[Timing], subtitle: str) -> Figure:
    """Draw a panel for each case and step: time over size, and where ours begins to be the faster one."""
    panels = list(dict.fromkeys((one.case, one.step) for one in timings))
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(12, 0.8 + 3.8 * rows), layout="constrained")
    figure.suptitle(f"Wall time of an iteration, median of alternating runs\n{subtitle}")
    grid = figure.subplots(rows, 2, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, (case, step) in zip(grid, panels):
        _panel(axes, [one for one in timings if (one.case, one.step) == (case, step)])
        axes.set_title(f"{case}, {step}")
    return figure


def _panel(axes: Axes, timings: Sequence[Timing]) -> None:
    curves: dict[str, dict[int, float]] = {}
    for one in timings:
        curves.setdefault(one.peer, {})[one.elements] = one.seconds or 0.0
    ours = next((curve for peer, curve in curves.items() if peer.startswith("cupyfused")), {})
    for peer, curve in curves.items():
        colour, marker = _style(peer)
        sizes = sorted(curve)
        label = peer
        if ours and curve is not ours:
            label += f": {compared(ours, curve)}"
            first = crossover(ours, curve)
            if first is not None and first != sizes[0]:
                axes.axvline(first, color=colour, linestyle="--", linewidth=1.2)
        axes.plot(sizes, [1e6 * curve[size] for size in sizes], marker=marker, color=colour, label=label, linewidth=1.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="elements", ylabel="microseconds")
    axes.grid(which="both", alpha=0.2)
    axes.legend(loc="upper left", fontsize="small")


def compared(ours: dict[int, float], other: dict[int, float]) -> str:
    """Say at which of their common sizes the other is slower, by more than noise.

    Examples
    --------
    >>> compared({1: 5.0, 2: 5.0, 4: 5.0}, {1: 3.0, 2: 6.0, 4: 12.0})
    'slower from 2^1 on'
    """
    sizes = ours.keys() & other.keys()
    slower = [size for size in sizes if other[size] > _NOISE * ours[size]]
    if not slower or len(slower) == len(sizes):
        return f"slower at {'every' if slower else 'no'} size"
    first = crossover(ours, other)
    return f"slower at {len(slower)} of {len(sizes)} sizes" if first is None else f"slower from 2^{first.bit_length() - 1} on"


# ---- peers --------------------------------------------------------------------------------------------------------------


def _peers(timings: Sequence[Timing], subtitle: str) -> Figure:
    """Draw bars: GPU time at the largest size, and the wall time of a call on 1M floats, as every tutorial compares it."""
    gpu = [one for one in timings if one.step in _STEPS and one.floor]
    largest = max((one.elements for one in gpu), default=0)
    panels = list(_bars_of([one for one in gpu if one.elements == largest], [one for one in timings if one.step == WALL]))
    figure = Figure(figsize=(6.4 * len(panels), 1.6 + 0.36 * max(len(rows) for _, rows in panels)), layout="constrained")
    figure.suptitle(f"clamp(x * scale + bias, 0, 1): every way side by side\n{subtitle}")
    for axes, (title, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        _bars(axes, title, rows)
    return figure


def _bars_of(gpu: Sequence[Timing], wall: Sequence[Timing]) -> Iterator[tuple[str, list[Timing]]]:
    for step in _STEPS:
        rows = [one for one in gpu if one.step == step]
        if rows:
            yield f"GPU time, {step}, {rows[0].elements:,} elements", rows
    if wall:
        yield f"{WALL}, {wall[0].elements:,} elements", list(wall)


def _bars(axes: Axes, title: str, rows: Sequence[Timing]) -> None:
    rows = sorted(rows, key=lambda one: one.seconds or 0.0)
    times = [1e3 * (one.seconds or 0.0) for one in rows]
    axes.barh(range(len(rows)), times, color=[_OURS if one.peer.startswith("cupyfused") else _OTHER for one in rows])
    if max(times) > 20 * min(times):
        axes.set_xscale("log")
        axes.set_xlim(min(times) / 2, max(times) * 6)  # room for the figures beside the bars
    else:
        axes.set_xlim(0, max(times) * 1.2)
    for place, (one, length) in enumerate(zip(rows, times)):
        axes.text(length, place, f" {readable(one.seconds or 0.0)}", va="center", fontsize="small")
    if rows[0].floor:
        axes.axvline(1e3 * rows[0].floor, color=_COPY, linewidth=1.5, label="a copy of as many bytes")
        axes.legend(loc="upper right", fontsize="small")  # the short bars are above
    axes.set_yticks(range(len(rows)), [one.peer for one in rows])
    axes.invert_yaxis()
    axes.set(title=title, xlabel="milliseconds")
    axes.title.set_fontsize("medium")
