"""An op as PyTorch operations: for whoever traces it, transforms it, or differentiates it more than once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._gates import is_transformed, is_wrapped

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
    cast = [_to(value, compute) for value in values]
    for k in range(len(op.inputs), len(cast)):
        if isinstance(cast[k], Tensor) and cast[k].device != values[0].device:
            # PyTorch clamps by tensors of one device only; the addition takes the number from the CPU by value, without a copy.
            cast[k] = torch.zeros((), dtype=compute, device=values[0].device) + cast[k]
    if rule is not None and op.traced_reference is not None:
        return _to(op.traced_reference(torch, *cast, *rule), dtype)  # type: ignore[no-any-return]
    return _to(op.reference(torch, *cast), dtype)  # type: ignore[no-any-return]


def _to(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor; a cast that changes nothing would stand in an exported program, with an assertion on its dtype."""
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype != dtype else value


def composed_gradients(
    compute: Callable[[Sequence[Any]], Any], grad_out: Any, values: Sequence[Any], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return the wanted gradients of `compute(values)`, a tensor or several, by PyTorch operations.

    With grad mode on they can be differentiated again. Where functorch levels are open, or a batch of gradients comes in, by
    `torch.func.vjp`, which nests; else by `autograd.grad`, which saved-tensor hooks do not stop.
    """
    places = [k for k, asked in enumerate(wanted) if asked]
    if not places:
        return [None] * len(wanted)

    def on_places(*chosen: Tensor) -> Any:
        arguments = list(values)
        for k, value in zip(places, chosen):
            arguments[k] = value
        return compute(arguments)

    incoming = grad_out if isinstance(grad_out, tuple) else (grad_out,)
    if is_transformed() or any(is_wrapped(one) for one in incoming):
        found = iter(torch.func.vjp(on_places, *[values[k] for k in places])[1](grad_out))
        return [next(found) if asked else None for asked in wanted]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that a tensor that is passed in two places gets each place's gradient once.
        given = [values[k] for k in places]
        chosen = [one.view_as(one) if create_graph and one.requires_grad else one.detach().requires_grad_() for one in given]
        y = on_places(*chosen)
        found = iter(torch.autograd.grad(y, chosen, grad_out, create_graph=create_graph, allow_unused=True, materialize_grads=True))
    return [next(found) if asked else None for asked in wanted]
