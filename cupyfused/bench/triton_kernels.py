"""The same operator written by hand in Triton: contiguous float32 x and bias of one shape, 0-dim scale, all three gradients.

Nothing is searched for at run time: 1,024 elements for 4 warps are two 16-byte packets a thread and operand. Backward sums the
gradient of scale in each program's registers over many blocks, so that few partial sums are left.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cases import BOUNDS

__all__ = ["ScaleBiasClamp"]

BLOCK = 1024
WARPS = 4
PROGRAMS_OF_A_MULTIPROCESSOR = 16  # 2,048 threads, all that one holds


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(x, scale, bias, y, count, min_val, max_val, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    v = tl.load(x + offsets, mask=inside) * tl.load(scale) + tl.load(bias + offsets, mask=inside)
    tl.store(y + offsets, tl.minimum(tl.maximum(v, min_val), max_val), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_out,
    x,
    scale,
    bias,
    grad_x,
    grad_bias,
    partial_sums,
    count,
    min_val,
    max_val,
    BLOCK: tl.constexpr,  # noqa: N803
):
    total = tl.zeros([BLOCK], tl.float32)
    factor = tl.load(scale)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < count
        value = tl.load(x + offsets, mask=inside, other=0.0)
        v = value * factor + tl.load(bias + offsets, mask=inside, other=0.0)
        g = tl.load(grad_out + offsets, mask=inside, other=0.0)
        g = tl.where((v >= min_val) & (v <= max_val), g, 0.0)
        tl.store(grad_x + offsets, g * factor, mask=inside)
        tl.store(grad_bias + offsets, g, mask=inside)
        total += g * value
    tl.store(partial_sums + tl.program_id(0), tl.sum(total))


class ScaleBiasClamp(torch.autograd.Function):
    """`clamp(x * scale + bias, *BOUNDS)` by the two kernels; fewer than 2^31 elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, scale, bias)
        y = torch.empty_like(x)
        forward_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, scale, bias, y, x.numel(), *BOUNDS, BLOCK=BLOCK, num_warps=WARPS)
        return y

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: D102
        x, scale, bias = ctx.saved_tensors
        grad_x, grad_bias = torch.empty_like(x), torch.empty_like(bias)
        programs = min(triton.cdiv(x.numel(), BLOCK), _multiprocessors(x) * PROGRAMS_OF_A_MULTIPROCESSOR)
        partial_sums = torch.empty(programs, device=x.device)
        backward_kernel[(programs,)](
            *(grad_out.contiguous(), x, scale, bias, grad_x, grad_bias, partial_sums, x.numel(), *BOUNDS),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        return grad_x, partial_sums.sum(), grad_bias


def _multiprocessors(x: Tensor) -> int:
    if x.device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
