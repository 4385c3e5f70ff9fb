"""How things are timed: the GPU between events, and the wall time of an iteration over alternating runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import CudaError

__all__ = ["ITERATIONS_OF_A_GRAPH", "captured", "copies", "gpu_seconds", "waiter", "wall_seconds"]

Call = Callable[[], object]

ITERATIONS_OF_A_GRAPH = 10
_ATTEMPTS = 6
_CYCLES = 16_000_000  # about 10 ms in which the host enqueues ahead; doubled where that was too short
_FAR_LARGER = 4  # a call that moves this many times the L2 cache finds next to nothing in it


def gpu_seconds(calls: Mapping[str, Call], moved: int, rounds: int = 5, repeats: int = 10) -> dict[str, float]:
    """Return the median GPU time of each call on the current stream, the calls taking turns.

    A round is enqueued whole behind a kernel that only waits, so that the host's time does not count, and a round that the GPU
    caught up with is measured again. Each call finds a cold L2 cache: where it moves less than a few times the cache's size,
    other memory is written before it.

    Parameters
    ----------
    calls
        What is timed, by name.
    moved
        Bytes that a call reads and writes.
    rounds, repeats
        Turns of each call, and calls in a turn.

    Raises
    ------
    CudaError
        The host cannot enqueue a round before the GPU gets to it.
    """
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = None if moved >= _FAR_LARGER * cache else torch.empty(_FAR_LARGER * cache, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        for _ in range(2):  # the first compiles, the second takes its memory from where the first gave it back
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] += _enqueued_ahead(name, call, repeats, flush)
    return {name: statistics.median(one) for name, one in times.items()}


def _enqueued_ahead(name: str, call: Call, repeats: int, flush: Tensor | None) -> list[float]:
    cycles = _CYCLES
    for _ in range(_ATTEMPTS):
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        awake = torch.cuda.Event()
        awake.record()
        if flush is None:
            spans = [_span(call, repeats)]
        else:
            spans = []
            for _ in range(repeats):
                flush.zero_()
                spans.append(_span(call, 1))
        was_ahead = not awake.query()
        torch.cuda.synchronize()
        if was_ahead:
            count = repeats if flush is None else 1
            return [begin.elapsed_time(end) / 1000 / count for begin, end in spans]
        cycles *= 2
    raise CudaError(f"{name}: the GPU caught up with the host in each of {_ATTEMPTS} rounds: the call waits for the GPU.")


def _span(call: Call, repeats: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    return begin, end


def copies(moved: int) -> dict[str, Call]:
    """Return the copies that together move `moved` bytes: PyTorch's own and an elementwise kernel; the faster one is the floor."""
    source = torch.zeros(max(moved // 8, 1), device="cuda")  # float32: four bytes read and four written
    target = torch.empty_like(source)
    return {"copy_": lambda: target.copy_(source), "neg": lambda: torch.neg(source, out=target)}


def waiter(device: str) -> Call:
    """Return what waits until a device has done all that was enqueued; a CPU call returns when it is done."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def wall_seconds(
    calls: Mapping[str, Call],
    device: str,
    *,
    rounds: int = 11,
    least: float = 0.01,
    most: int = 1_000_000,
    counts_wait: bool = True,
) -> dict[str, float]:
    """Return the median over alternating runs of the wall time of one iteration.

    Parameters
    ----------
    calls
        What is timed, by name.
    device
        "cuda" or "cpu"; waited for once a run.
    rounds, least, most
        Runs of each call, the seconds that a run takes at least, and its calls at most.
    counts_wait
        Whether the wait at the end of a run counts. Without it the time is the host's own, as long as a run is less than the
        GPU's queue holds, about a thousand launches, or the GPU keeps up.
    """
    synchronise = waiter(device)

    def run(call: Call, count: int) -> float:
        synchronise()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        if counts_wait:
            synchronise()
        return time.perf_counter() - begin

    counts = {}
    for name, call in calls.items():
        run(call, 1)  # compiles
        count = 1
        while (taken := run(call, count)) < least and count < most:
            count = min(max(2 * count, int(count * least / max(taken, 1e-9))), most)
        counts[name] = count
    names, times = list(calls), {name: list[float]() for name in calls}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(run(calls[name], counts[name]) / counts[name])
    return {name: statistics.median(one) for name, one in times.items()}


def captured(call: Call) -> Call:
    """Capture `ITERATIONS_OF_A_GRAPH` iterations in a CUDA graph and return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ITERATIONS_OF_A_GRAPH):
            call()
    return graph.replay
