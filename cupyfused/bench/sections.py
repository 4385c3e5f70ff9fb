"""The parts of the benchmark; each yields what it measured, and what could not take part."""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CupyfusedError
from . import peers as all_peers
from .cases import FEW_LAYOUTS, FLAT, LAYOUTS, bytes_moved, operands
from .first_result import ELEMENTS, measure
from .peers import Peer
from .ready import Describe, Ready, bind, by_step, failure, make_ready
from .results import TRAINING, Absent, Timing
from .timing import ITERATIONS_OF_A_GRAPH, captured, copies, gpu_seconds, wall_seconds

__all__ = ["FRESH", "SECTIONS", "WALL", "Plan"]

WALL = "wall time of a call"
FRESH = "fresh process"
LATENCY_SIZES, LATENCY_SIZES_QUICK = range(10, 23, 2), (10, 20)  # exponents of 2
CPU_SIZES, CPU_SIZES_QUICK = range(10, 25, 2), (10, 16, 20)
_IMPORTS = """
import time
begin = time.perf_counter(); import numpy; middle = time.perf_counter(); import cupyfused; end = time.perf_counter()
print(middle - begin, end - middle)
"""


class Plan(NamedTuple):
    """What a run does."""

    no_gpu: str  # why there is none; "" where there is one
    quick: bool
    elements: int  # of x, where the GPU's memory decides
    scratch: Path
    say: Callable[[str], None]  # shows what is being measured


Found = Iterator[Timing | Absent]


def _present(peers: Iterable[Peer]) -> tuple[list[Peer], list[Absent]]:
    reasons = {peer: peer.absent() for peer in peers}
    return [peer for peer, why in reasons.items() if not why], [Absent(peer.name, why) for peer, why in reasons.items() if why]


def _on_gpu(ready: Sequence[Ready], tensors: Sequence[Tensor], describe: Describe) -> Iterator[Timing]:
    """Yield the GPU times of each step, beside a copy of as many bytes."""
    for step, calls in by_step(ready):
        moved = bytes_moved(tensors, tensors[0], gradients=step == TRAINING)
        copied = copies(moved)
        try:
            times = gpu_seconds({**copied, **calls}, moved)
        except (CupyfusedError, RuntimeError) as error:  # RuntimeError: PyTorch's, of too little memory among others
            yield from (describe(peer=name, step=step, problem=failure(error)) for name in calls)
            continue
        floor = min(times[name] for name in copied)
        for name in calls:
            yield describe(peer=name, step=step, seconds=times[name], moved=moved, floor=floor)


# ---- the sections -------------------------------------------------------------------------------------------------------


def layouts(plan: Plan) -> Found:
    """Time each layout and dtype on the GPU, as shares of a copy's rate."""
    peers, absent = _present((all_peers.COMPOSED, all_peers.COMPILED, all_peers.CUPYFUSED))
    yield from absent
    for dtype in (torch.float32,) if plan.quick else (torch.float32, torch.bfloat16, torch.float16):
        for layout in FEW_LAYOUTS if plan.quick else LAYOUTS:
            name = str(dtype).removeprefix("torch.")
            plan.say(f"{name}, {layout.name}")
            torch.compiler.reset()  # each layout is compiled for itself
            tensors = operands(layout, plan.elements, dtype, "cuda")
            describe = functools.partial(Timing, "layouts", layout.name, dtype=name, elements=tensors[0].numel())
            ready, problems = make_ready(peers, tensors, plan.scratch, describe)
            yield from problems
            torch.cuda.empty_cache()
            yield from _on_gpu(ready, tensors, describe)
            del ready, tensors
            torch.cuda.empty_cache()


def latency(plan: Plan) -> Found:
    """Time small to middling sizes by the wall: eager beside eager, CUDA graph beside CUDA graph."""
    peers, absent = _present((all_peers.COMPOSED, all_peers.COMPILED, all_peers.CUPYFUSED))
    yield from absent
    for exponent in LATENCY_SIZES_QUICK if plan.quick else LATENCY_SIZES:
        plan.say(f"2^{exponent} elements")
        torch.compiler.reset()
        tensors = operands(FLAT, 2**exponent, torch.float32, "cuda")
        describe = functools.partial(Timing, "latency", elements=2**exponent)
        ready, problems = make_ready(peers, tensors, plan.scratch, functools.partial(describe, "eager"))
        yield from problems
        for step, calls in by_step(ready):
            for name, seconds in wall_seconds(calls, "cuda").items():
                yield describe("eager", name, step, seconds)
            replays = {name: captured(call) for name, call in calls.items()}
            for name, seconds in wall_seconds(replays, "cuda").items():
                yield describe("CUDA graph", name, step, seconds / ITERATIONS_OF_A_GRAPH)


class _Identity(torch.autograd.Function):
    """What a Function with the same inputs and gradients costs that computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


def host(plan: Plan) -> Found:
    """Time what a call on 1,024 floats costs the host."""
    plan.say("1,024 elements")
    peers = (all_peers.COMPOSED, all_peers.COMPILED, all_peers.CUPYFUSED, all_peers.CUPY, all_peers.OURS_ON_CUPY)
    present, absent = _present(peers)
    yield from absent
    torch.compiler.reset()
    tensors = operands(FLAT, 1024, torch.float32, "cuda")
    describe = functools.partial(Timing, "host", "1,024 elements", elements=1024)
    ready, problems = make_ready(present, tensors, plan.scratch, describe)
    yield from problems
    identity = Peer("a Function that computes nothing", lambda scratch: _Identity.apply)
    x, _, bias = tensors
    ready = [Ready("torch.add", lambda: torch.add(x, bias)), bind(identity, _Identity.apply, tensors), *ready]
    steps = {
        "no gradient": {one.name: one.forward for one in ready},
        "recorded": {one.name: one.recorded for one in ready if one.recorded is not None},
        TRAINING: {one.name: one.training for one in ready if one.training is not None},
    }
    for step, calls in steps.items():
        for name, seconds in wall_seconds(calls, "cuda", counts_wait=False).items():
            yield describe(peer=name, step=step, seconds=seconds)


def cold(plan: Plan) -> Found:
    """Time the import, and the first result with empty and with filled cache, in fresh processes."""
    plan.say("import")
    command = [sys.executable, "-c", _IMPORTS]
    printed = [subprocess.check_output(command, text=True).split() for _ in range(3 if plan.quick else 7)]
    for name, times in zip(("NumPy", "cupyfused, after NumPy"), zip(*printed)):
        yield Timing("cold", "import", name, "import", statistics.median(map(float, times)))
    if plan.no_gpu:
        yield Absent("cold: first result", plan.no_gpu)
        return
    with tempfile.TemporaryDirectory(dir=plan.scratch) as caches:
        for state in ("empty cache", "filled cache"):
            plan.say(f"first result, {state}")
            for step, seconds in measure(all_peers.CUPYFUSED.name, plan.scratch, Path(caches)).items():
                yield Timing("cold", state, all_peers.CUPYFUSED.name, step, seconds, elements=ELEMENTS)


def peers(plan: Plan) -> Found:
    """Time every way side by side: the GPU alone, a call by the wall, the build and the first result."""
    on_gpu: list[Peer] = []
    if plan.no_gpu:
        yield Absent("peers on a GPU", plan.no_gpu)
    else:
        slow = "C++/CUDA extension" if plan.quick else ""
        if slow:
            yield Absent(slow, "left out by --quick: nvcc takes longer than all the rest")
        on_gpu, absent = _present(peer for peer in all_peers.ON_GPU if peer.name != slow)
        yield from absent
    on_cpu, absent = _present(all_peers.ON_CPU)
    yield from absent
    if not plan.quick:
        yield from _first_results([*on_gpu, *on_cpu], plan)
    groups = [("cpu", on_cpu, ELEMENTS)]
    groups += [("cuda", on_gpu, elements) for elements in sorted({ELEMENTS, plan.elements})] if on_gpu else []
    for device, group, elements in groups:
        plan.say(f"{elements:,} elements, {device}")
        torch.compiler.reset()
        tensors = operands(FLAT, elements, torch.float32, device)
        describe = functools.partial(Timing, "peers", f"{elements:,} elements", elements=elements)
        ready, problems = make_ready(group, tensors, plan.scratch, describe)
        yield from problems
        if device == "cuda":
            yield from _on_gpu(ready, tensors, describe)
        if elements == ELEMENTS:
            for name, seconds in wall_seconds({one.name: one.forward for one in ready}, device, rounds=7).items():
                yield describe(peer=name, step=WALL, seconds=seconds)


def _first_results(peers: Iterable[Peer], plan: Plan) -> Iterator[Timing]:
    for peer in peers:
        plan.say(f"first result of {peer.name}")
        describe = functools.partial(Timing, "peers", FRESH, peer.name, elements=ELEMENTS)
        try:
            with tempfile.TemporaryDirectory(dir=plan.scratch) as caches:
                for step, seconds in measure(peer.name, plan.scratch, Path(caches)).items():
                    yield describe(step=step, seconds=seconds)
        except CupyfusedError as error:
            yield describe(step="first result", problem=str(error))


def cpu(plan: Plan) -> Found:
    """Time CPU tensors and NumPy arrays, ours beside the composed expression."""
    pairs = {
        "PyTorch": (all_peers.COMPOSED, all_peers.CUPYFUSED),
        "NumPy": tuple(peer for peer in all_peers.ON_CPU if peer.name in ("NumPy", "cupyfused, NumPy arrays")),
    }
    for exponent in CPU_SIZES_QUICK if plan.quick else CPU_SIZES:
        tensors = operands(FLAT, 2**exponent, torch.float32, "cpu")
        for case, pair in pairs.items():
            plan.say(f"2^{exponent} elements, {case}")
            describe = functools.partial(Timing, "cpu", case, elements=2**exponent)
            ready, problems = make_ready(pair, tensors, plan.scratch, describe)
            yield from problems
            for step, calls in by_step(ready):
                for name, seconds in wall_seconds(calls, "cpu").items():
                    yield describe(peer=name, step=step, seconds=seconds)


SECTIONS: dict[str, Callable[[Plan], Found]] = {
    "layouts": layouts,
    "latency": latency,
    "host": host,
    "cold": cold,
    "peers": peers,
    "cpu": cpu,
}
