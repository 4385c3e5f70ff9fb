"""The dtype of a call with PyTorch operands, told from their dtypes alone, and what `torch.autocast` makes of it.

Dynamo follows everything here, so it is kept to what Dynamo 2.6 can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._dtypes import BY_NAME, Dtype, Rank, Typed, fold_types, number_dtype

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["DTYPES", "TORCH_DTYPES", "autocasts", "result_dtype"]

DTYPES: dict[torch.dtype, Dtype] = {getattr(torch, name): dtype for name, dtype in BY_NAME.items()}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in BY_NAME}
_SMALL = (torch.float16, torch.bfloat16)


def autocasts(op: Op, device_type: str) -> bool:
    """Whether autocast is on and has anything to say of this op."""
    return op.autocast != "none" and torch.is_autocast_enabled(device_type)


def result_dtype(op: Op, values: Sequence[Any]) -> torch.dtype:
    """Fold promotion over the operands, as autocast would have cast them first.

    Nothing is cast in memory for it: kernels load each operand in its own dtype, and store the result in this one.
    """
    default = DTYPES[torch.get_default_dtype()]
    widened = autocasts(op, values[0].device.type) and _widens(op, values)
    inputs = [_typed(value, default, widened) for value in values[: len(op.inputs)]]
    options = [_typed(value, default, widened) for value in values[len(op.inputs) :] if value is not None]
    return TORCH_DTYPES[fold_types(inputs, options).name]


def _widens(op: Op, values: Sequence[Any]) -> bool:
    """Whether autocast takes 16-bit floats as float32: always, or where operands differ. It leaves float64 alone."""
    dtypes = [value.dtype for value in values if isinstance(value, Tensor)]
    small = [dtype for dtype in dtypes if dtype in _SMALL]
    differ = torch.float32 in dtypes or len([dtype for dtype in small if dtype != small[0]]) > 0
    return op.autocast == "float32" or differ


def _typed(value: Any, default: Dtype, widened: bool) -> Typed:
    if isinstance(value, Tensor):
        dtype = torch.float32 if widened and value.dtype in _SMALL else value.dtype
        return Typed(DTYPES[dtype], Rank.ARRAY if value.dim() else Rank.ZERO_DIM)
    return Typed(number_dtype(value, default), Rank.NUMBER)
