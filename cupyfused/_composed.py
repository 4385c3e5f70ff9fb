"""An op as PyTorch operations: for whoever traces it, transforms it, or differentiates it more than once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["COMPUTE", "composed_gradients", "decomposed"]

# What the arithmetic runs in, where that is not the dtype of the result: one rounding at the end, like the kernels.
COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def decomposed(op: Op, values: Sequence[Any], dtype: torch.dtype, rule: Sequence[float] | None) -> Tensor:
    """Compute an op by PyTorch operations, whichever mode, transform or tracer sees them.

    `rule`: what the op's gradient takes besides, given if options came as numbers, though they are 0-dim tensors by now.
    """
    compute = COMPUTE.get(dtype, dtype)
    cast = [value.to(compute) if isinstance(value, Tensor) else value for value in values]
    for k in range(len(op.inputs), len(cast)):
        if isinstance(cast[k], Tensor) and cast[k].device != values[0].device:
            # PyTorch clamps by tensors of one device only; the addition takes the number from the CPU by value, without a copy.
            cast[k] = torch.zeros((), dtype=compute, device=values[0].device) + cast[k]
    if rule is not None and op.traced_reference is not None:
        return op.traced_reference(torch, *cast, *rule).to(dtype)  # type: ignore[no-any-return]
    return op.reference(torch, *cast).to(dtype)  # type: ignore[no-any-return]


def composed_gradients(
    compute: Callable[[Sequence[Any]], Any], grad_out: Any, values: Sequence[Any], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return the wanted gradients of `compute(values)`, a tensor or several, by PyTorch operations.

    With grad mode on they can be differentiated again.

    `torch.func.vjp` rather than `autograd.grad`: it differentiates where functorch levels are open too, and gives a tensor that is
    passed in two places each place's gradient once.
    """
    places = [k for k, asked in enumerate(wanted) if asked]

    def on_places(*chosen: Tensor) -> Any:
        arguments = list(values)
        for k, value in zip(places, chosen):
            arguments[k] = value
        return compute(arguments)

    pull_back = torch.func.vjp(on_places, *[values[k] for k in places])[1]
    found = iter(pull_back(grad_out))
    return [next(found) if asked else None for asked in wanted]
