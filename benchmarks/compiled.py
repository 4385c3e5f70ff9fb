"""Measure what `torch.compile` makes of an operator, opaque and decomposed, on this machine's GPU.

    python benchmarks/compiled.py

Prints the GPU's and the host's time of one iteration, forward and forward + backward, for a lone operator per channel and for a
block that normalises, modulates and multiplies by a matrix (as diffusion transformers do), from small to large. Results are
compared with float64 before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import cupyfused
from cupyfused.bench.timing import gpu_seconds, wall_seconds

Step = Callable[..., Tensor]


def composed_scale_bias(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return x * scale + bias


def lone(op: Step) -> Step:
    """The operator alone, clamped."""

    def step(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if op is composed_scale_bias:
            return torch.clamp(x * scale + bias, -1.0, 1.0)
        return cupyfused.fused_scale_bias_clamp(x, scale, bias, -1.0, 1.0)

    return step


def block(op: Step) -> Step:
    """Normalise, modulate, multiply."""

    def step(x: Tensor, scale: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        normal = F.layer_norm(x, x.shape[-1:])
        return F.linear(op(normal, 1 + scale, bias), weight)

    return step


def ways(step: Callable[[Step], Step]) -> Iterator[tuple[str, Step]]:
    """Yield each way to run a step; the setting is read when a step is compiled, at its first call."""
    yield "composed, eager", step(composed_scale_bias)
    yield "cupyfused, eager", step(cupyfused.fused_scale_bias)
    yield "composed, compiled", torch.compile(step(composed_scale_bias), fullgraph=True)
    for mode in ("decompose", "opaque"):
        torch.compiler.reset()
        cupyfused.set_compile_mode(mode)  # type: ignore[arg-type]
        yield f"cupyfused, compiled, {mode}", torch.compile(step(cupyfused.fused_scale_bias), fullgraph=True)
    cupyfused.set_compile_mode("decompose")


def measure(title: str, step: Callable[[Step], Step], operands: Sequence[Tensor]) -> None:
    """Print the times of each way for one set of operands."""
    print(f"\n{title}\n  {'':30s}  GPU forward  forward+backward    host forward  forward+backward  (microseconds)")
    leaves = [one.detach().requires_grad_() for one in operands]
    exact = step(composed_scale_bias)(*[one.double() for one in operands])
    grad_out = torch.randn_like(exact).to(operands[0].dtype)
    scale = float(exact.std())
    moved = 2 * sum(one.numel() * one.element_size() for one in operands)
    for name, call in ways(step):  # one after the other: a setting holds for what is compiled while it holds
        y = call(*operands)
        error = float((y.double() - exact).abs().max()) / scale
        if not error < 0.1:  # a NaN is wrong too
            raise SystemExit(f"{name} is wrong by {error}: nothing more is timed")
        steps: dict[str, Callable[[], object]] = {
            "forward": functools.partial(call, *operands),
            "both": functools.partial(gradients, call, leaves, grad_out),
        }
        on_gpu = gpu_seconds(steps, moved)
        on_host = wall_seconds(steps, "cuda", most=50, counts_wait=False)
        times = [1e6 * one for one in (*on_gpu.values(), *on_host.values())]
        print(f"  {name:30s}{times[0]:13.0f}{times[1]:18.0f}{times[2]:16.0f}{times[3]:18.0f}", flush=True)


def gradients(call: Step, leaves: Sequence[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """Run a step forward and backward."""
    return torch.autograd.grad(call(*leaves), leaves, grad_out)


def main() -> None:
    """Run all tables."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for dtype in (torch.bfloat16, torch.float32):

        def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        for images in (1, 4, 16, 64):
            shape = (images, 256, 64, 64)
            measure(f"lone operator, {dtype}, NCHW {shape}", lone, [random(*shape), random(256, 1, 1), random(256, 1, 1)])
        shape = (32768, 4096)
        measure(f"lone operator, {dtype}, last dim {shape}", lone, [random(*shape), random(4096), random(4096)])
        for rows in (256, 4096):
            shape = (8, rows, 2048)
            weight = random(2048, 2048) / 45
            measure(
                f"normalise, modulate, linear, {dtype}, {shape}",
                block,
                [random(*shape), random(8, 1, 2048), random(8, 1, 2048), weight],
            )


if __name__ == "__main__":
    main()
