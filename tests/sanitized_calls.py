"""Runs kernels of every layout class and dtype on the CPU; `test_sanitizers` starts it under AddressSanitizer and UBSan.

Each array is an allocation of its own, between the guard zones that the sanitizer puts around it, so that a load or store one
element outside it ends the process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import torch

from cupyfused import fused_scale_bias, fused_scale_bias_clamp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Shape = tuple[int, ...]

# Whole packets, a cut last packet, uneven rows; each kind of broadcast; nothing to broadcast; many dims.
SHAPES: Sequence[tuple[Shape, Shape, Shape]] = (
    ((3, 64), (64,), (64,)),
    ((2, 3, 32), (3, 1), (3, 1)),
    ((1037,), (), ()),
    ((5, 33), (5, 1), (33,)),
    ((6, 160), (6, 1), (160,)),
    ((3, 4, 16), (3, 1, 16), (4, 16)),
    ((16,), (5, 16), (1,)),
    ((4, 48), (4, 48), (4, 48)),
    ((9, 33), (33,), (1,)),
    ((5, 7, 9), (7, 1), (9,)),
)


def fresh(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape).to(dtype)


def layouts(shape: Shape, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    yield fresh(shape, dtype)
    if len(shape) > 1:
        yield fresh((*shape[:-2], shape[-1], shape[-2]), dtype).transpose(-1, -2)
        yield fresh((*shape[:-1], 2 * shape[-1] + 1), dtype)[..., 1::2]
    if shape:
        yield fresh((math.prod(shape) + 1,), dtype)[1:].view(shape)
        yield fresh((shape[0] * 64 + 1,), dtype)[1:].as_strided(shape, [1] * len(shape))


def call_all(dtype: torch.dtype, parameter: torch.dtype) -> int:
    calls = 0
    for x_shape, scale_shape, bias_shape in SHAPES:
        for x in layouts(x_shape, dtype):
            arrays = [x, fresh(scale_shape, parameter), fresh(bias_shape, parameter)]
            for one in arrays:
                one.requires_grad_(one.is_floating_point())
            y = fused_scale_bias_clamp(*arrays, 2, 90, impl="host")
            fused_scale_bias(*(one.detach() for one in arrays), impl="host")
            calls += 2
            if y.is_floating_point():
                # By turns of one row for all, and dense.
                y.backward(fresh(y.shape if calls % 2 else y.shape[-1:], y.dtype).expand(y.shape))
                calls += 1
    return calls


def main(part: str) -> None:
    pairs = [(dtype, dtype) for dtype in (FLOATS if part == "floats" else INTEGERS)]
    if part == "mixed":
        pairs = [
            (torch.uint8, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float64),
            (torch.int64, torch.float16),
        ]
    print(sum(call_all(*pair) for pair in pairs), "calls")


if __name__ == "__main__":
    main(sys.argv[1])
