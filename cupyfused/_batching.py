"""`torch.func.vmap` of the registered operators: a batch is one more dim in front, and one launch computes it all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._composed import decomposed
from ._promotion import result_dtype

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["backward_rule", "forward_rule"]

Dims = Sequence["int | None"]


def _aligned(values: Sequence[Any], dims: Dims) -> list[Any]:
    """Move each batch to the front, and give batched operands the dims that broadcasting would have added behind it."""
    rank = max(value.dim() - (dim is not None) for value, dim in zip(values, dims) if value is not None)
    result = []
    for value, dim in zip(values, dims):
        if value is not None and dim is not None:
            value = value.movedim(dim, 0)
            value = value.reshape(value.shape[0], *(1,) * (rank + 1 - value.dim()), *value.shape[1:])
        result.append(value)
    return result


def forward_rule(
    op: Op, info: Any, dims: Dims, *values: Any, dtype: torch.dtype | None = None, numbers: bool = False
) -> tuple[Tensor, int]:
    """Compute a batch by the operator itself, or by PyTorch operations where a batch of options leaves no 0-dim ones."""
    inputs, values, dims = len(op.inputs), op.complete(values), op.complete(dims)
    aligned = _aligned(values, dims)
    if dtype is None:
        dtype = _unbatched_dtype(op, values, dims)
    if any(dim is not None for dim in dims[inputs:]):
        y = decomposed(op, aligned, dtype, op.rule(False) if numbers else None)
    else:
        y = getattr(torch.ops.cupyfused, op.name)(*aligned, dtype=dtype, numbers=numbers)
    return y, 0


def _unbatched_dtype(op: Op, values: Sequence[Any], dims: Dims) -> torch.dtype:
    """Promote as each sample would by itself: there a batch of 0-dim tensors is a 0-dim tensor."""
    return result_dtype(op, [one if dim is None else one.select(dim, 0) for one, dim in zip(values, dims)])


def backward_rule(
    op: Op, info: Any, dims: Dims, grad_out: Tensor, *values: Any, mask: Sequence[bool], numbers: bool
) -> tuple[Any, Any]:
    """Compute the gradients of each sample in one launch: an operand that samples share is expanded, and gets one from each."""
    inputs = len(op.inputs)
    backward = functools.partial(getattr(torch.ops.cupyfused, f"{op.name}_backward"), mask=mask, numbers=numbers)
    if any(dim is not None for dim in dims[inputs + 1 :]):
        return _one_by_one(backward, info.batch_size, (grad_out, *values), dims)
    grad_out, *aligned = _aligned((grad_out, *values), dims)
    if dims[0] is None:
        grad_out = grad_out.expand(info.batch_size, *grad_out.shape)
    for k, value in enumerate(aligned[:inputs]):
        if mask[k] and dims[k + 1] is None:
            shared = value.reshape(1, *(1,) * (grad_out.dim() - 1 - value.dim()), *value.shape)
            aligned[k] = shared.expand(info.batch_size, *shared.shape[1:])
    gradients = _as_tuple(backward(grad_out, *aligned))
    # Without the dims that alignment put in.
    given = list(zip(values, dims[1:]))[:inputs]
    shapes = [value.shape if dim is None else value.movedim(dim, 0).shape[1:] for value, dim in given]
    shaped = [None if one is None else one.reshape(one.shape[0], *shape) for one, shape in zip(gradients, shapes)]
    return _with_dims(shaped)


def _one_by_one(
    backward: Callable[..., Sequence[Tensor | None]], batch_size: int, values: Sequence[Any], dims: Dims
) -> tuple[Any, Any]:
    """Launch once for each sample: a batch of options leaves no 0-dim ones to launch once with."""
    samples = [[value if dim is None else value.select(dim, k) for value, dim in zip(values, dims)] for k in range(batch_size)]
    columns = zip(*[_as_tuple(backward(*sample)) for sample in samples])
    return _with_dims([None if column[0] is None else torch.stack(column) for column in columns])


def _as_tuple(returned: Any) -> tuple[Tensor | None, ...]:
    """An operator of one input returns one gradient, and no tuple."""
    return returned if isinstance(returned, tuple) else (returned,)


def _with_dims(gradients: Sequence[Tensor | None]) -> tuple[Any, Any]:
    dims = tuple(None if one is None else 0 for one in gradients)
    return (tuple(gradients), dims) if len(gradients) > 1 else (gradients[0], dims[0])
