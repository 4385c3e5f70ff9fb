"""Measure the operators on this machine's GPU.

    python examples/measure.py

Prints three tables: the share of a copy kernel's rate that each layout reaches, forward and forward + backward with all three
gradients; the host's time for a call on 1,024 floats beside composed PyTorch, compiled PyTorch and a Function that computes
nothing; and the first call of a fresh process, with an empty and with a filled kernel cache. Values are compared with float64
before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cupyfused import fused_scale_bias_clamp

BOUNDS = (-1.0, 1.0)
Case = tuple[str, list[Any]]


def cases(count: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yield x, scale and bias in the layouts that models have, all of `count` elements."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)

    x = random(count)
    yield "contiguous, 0-dim tensors", [x, random(), random()]
    yield "contiguous, numbers", [x, 1.5, 0.5]
    yield "NCHW, per channel (64, 256, -1)", [x.view(64, 256, -1), random(256, 1), random(256, 1)]
    yield "last dim (-1, 4096)", [x.view(-1, 4096), random(4096), random(4096)]
    yield "channels last (-1, 256)", [x.view(-1, 256), random(256), random(256)]
    yield "AdaLN (16, -1, 2048)", [x.view(16, -1, 2048), random(16, 1, 2048), random(16, 1, 2048)]
    yield "row by column (-1, 1), (4096)", [x.view(-1, 4096), random(count // 4096, 1), random(4096)]
    yield "bias of full size", [x, random(), random(count)]
    yield "transposed x", [x.view(8192, -1).t(), random(8192), random(8192)]
    yield "unaligned x", [random(count + 1)[1:], 1.5, 0.5]
    yield "odd width (-1, 1023)", [random(count // 1024, 1023), random(1023), random(1023)]


def gpu_milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Time calls that are all enqueued before the first one runs, so that the host's time does not count."""
    call()
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(4_000_000 + 3_000_000 * repeats)  # 1.5 ms of enqueuing a call
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / repeats)
    return best


def copy_rate(count: int, dtype: torch.dtype) -> float:
    """Return the bytes per millisecond of a kernel that reads and writes `count` elements."""
    x = torch.randn(count, device="cuda").to(dtype)
    y = torch.empty_like(x)
    fastest = min(gpu_milliseconds(lambda: torch.neg(x, out=y)), gpu_milliseconds(lambda: y.copy_(x)))
    return 2 * x.numel() * x.element_size() / fastest


def check(y: torch.Tensor, operands: list[Any]) -> None:
    """Refuse to time a wrong result."""
    part = [
        one[:2].double() if isinstance(one, torch.Tensor) and one.dim() == y.dim() and one.shape[0] == y.shape[0] else one
        for one in operands
    ]
    part = [one.double() if isinstance(one, torch.Tensor) else one for one in part]
    torch.testing.assert_close(y[:2].double(), (part[0] * part[1] + part[2]).clamp(*BOUNDS), rtol=1e-2, atol=1e-2)


def measure(name: str, operands: list[Any], rate: float) -> None:
    """Print one row: shares of the floor, and what backward holds beyond its gradients."""
    full = [
        one.numel() * one.element_size() for one in operands if isinstance(one, torch.Tensor) and one.numel() == operands[0].numel()
    ]
    inputs = [one.detach().requires_grad_() if isinstance(one, torch.Tensor) else one for one in operands]
    wanted = [one for one in inputs if isinstance(one, torch.Tensor)]
    with torch.no_grad():
        check(fused_scale_bias_clamp(*operands, *BOUNDS), operands)
        forward = gpu_milliseconds(lambda: fused_scale_bias_clamp(*operands, *BOUNDS))
    y = fused_scale_bias_clamp(*inputs, *BOUNDS)
    grad_out = torch.randn_like(y)
    backward = gpu_milliseconds(lambda: torch.autograd.grad(y, wanted, grad_out, retain_graph=True))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(y, wanted, grad_out, retain_graph=True)
    extra = torch.cuda.max_memory_allocated() - before - sum(one.numel() * one.element_size() for one in gradients)
    held = sum(full) * 2 + 2 * full[0]
    forward_floor = (sum(full) + full[0]) / rate
    backward_floor = (2 * sum(full) + full[0]) / rate
    shares = (forward_floor / forward, backward_floor / backward, (forward_floor + backward_floor) / (forward + backward))
    print(f"  {name:32s}" + "".join(f"{share:9.0%}" for share in shares) + f"{extra / held:12.2%}")


def host_microseconds(call: Callable[[], object], repeats: int = 2000) -> float:
    """Return the host's time for a call, the best of five rounds."""
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - begin) / repeats * 1e6)
    torch.cuda.synchronize()
    return best


class Identity(torch.autograd.Function):
    """What a Function with the same inputs and gradients costs that computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


def composed(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The expression by PyTorch operations."""
    return torch.clamp(x * scale + bias, *BOUNDS)


def fused(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same by this package."""
    return fused_scale_bias_clamp(x, scale, bias, *BOUNDS)


def host_table() -> None:
    """Print what a call costs the host."""
    operands = [torch.randn(shape, device="cuda") for shape in ((1024,), (), (1024,))]
    leaves = [one.clone().requires_grad_() for one in operands]
    grad_out = torch.randn(1024, device="cuda")
    print(f"  {'':24s} no gradient    recorded    forward + backward")
    print(f"  {'torch.add':24s}{host_microseconds(lambda: torch.add(operands[0], operands[2])):12.1f}")
    calls = {
        "identity Function": Identity.apply,
        "composed": composed,
        "composed, compiled": torch.compile(composed),
        "cupyfused": fused,
    }
    for name, call in calls.items():

        def both(call: Callable[..., Any] = call) -> object:
            return torch.autograd.grad(call(*leaves), leaves, grad_out)

        times = [
            host_microseconds(lambda call=call: call(*operands)),  # type: ignore[misc]
            host_microseconds(lambda call=call: call(*leaves), 500),  # type: ignore[misc]
            host_microseconds(both, 500),
        ]
        print(f"  {name:24s}" + "".join(f"{time:12.1f}" for time in times))


FIRST_CALL = """
import time, torch, cupy
import cupyfused
x = torch.randn(4, 8, 33, 32, device="cuda", requires_grad=True); s = torch.randn(8, 1, 1, device="cuda", requires_grad=True)
torch.cuda.synchronize(); begin = time.perf_counter()
y = cupyfused.fused_scale_bias_clamp(x, s, s, -1.0, 1.0); torch.cuda.synchronize(); forward = time.perf_counter() - begin
y.sum().backward(); torch.cuda.synchronize()
print(f"  forward {forward:.3f} s, forward + backward {time.perf_counter() - begin:.3f} s")
"""


def main() -> None:
    """Run all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2**27, help="elements of x (default 2**27)")
    count = parser.parse_args().elements
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {count} elements")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rate = copy_rate(count, dtype)
        print(f"\n{dtype}, share of a copy kernel's {rate / 1e6:,.0f} GB/s\n  {'':32s}  forward backward     both  workspace")
        for name, operands in cases(count, dtype):
            measure(name, operands, rate)
    print("\nhost, microseconds a call on 1,024 float32")
    host_table()
    with tempfile.TemporaryDirectory() as folder:
        for state in ("empty", "filled"):
            print(f"\nfirst call of a process, {state} cache", flush=True)
            subprocess.run([sys.executable, "-c", FIRST_CALL], env=os.environ | {"CUPYFUSED_CACHE_DIR": folder}, check=True)


if __name__ == "__main__":
    main()
