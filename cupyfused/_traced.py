"""A call that PyTorch traces, transforms or watches: what stands in its graph, by the setting of `compile_mode`.

Dynamo follows everything here, so it is kept to what Dynamo 2.6 can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _arrays, _op, _settings
from ._composed import decomposed
from ._dlpack import CPU, CUDA
from ._gates import in_forward_mode
from ._op import check_on_cuda
from ._promotion import result_dtype
from ._torch import check_options, no_gradients_with_out
from .errors import DtypeError, OperandError, message

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["compiled_call", "registered_call"]


def compiled_call(op: Op, values: Sequence[Any], out: Tensor | None, impl: str) -> Tensor:
    """Call an op in a graph that is compiled or exported: as one operator, or as PyTorch operations."""
    check_options(op, values)
    if impl == "cuda":
        check_on_cuda(op, (CUDA if values[0].device.type == "cuda" else CPU, 0))
    # On the device of x: a CUDA graph keeps its tensors in a pool of its own, and PyTorch clamps by tensors of one device only.
    tensors, dtype, numbers = _operands(op, values, values[0].device)
    if impl == "reference" or (impl == "auto" and _settings.compile_mode == "decompose"):
        y = decomposed(op, tensors, dtype, _rule(op.name) if numbers and op.traced_reference is not None else None)
    else:
        y = getattr(torch.ops.cupyfused, op.name).default(*tensors, dtype=dtype, numbers=numbers)
    return y if out is None else _write(op, y, out)


def _write(op: Op, y: Tensor, out: Tensor) -> Tensor:
    """Write a result to `out`: registered operators write to nothing, so that a compiler may reorder them."""
    if torch.is_grad_enabled() and (out.requires_grad or y.requires_grad):
        raise no_gradients_with_out(op)
    if (out.shape, out.dtype, out.device) != (y.shape, y.dtype, y.device):
        expected, got = (f"{tuple(one.shape)} {one.dtype} on {one.device}" for one in (y, out))
        raise OperandError(message(op.name, "out", expected=expected, got=got, remedy="Pass one that fits."))
    return out.copy_(y)


def registered_call(op: Op, values: Sequence[Any]) -> Tensor:
    """Call the registered operator, outside of compiled graphs: a number that stands on the CPU goes by value."""
    tensors, dtype, numbers = _operands(op, values, torch.device("cpu"))
    if in_forward_mode() and any(isinstance(option, Tensor) for option in values[len(op.inputs) :]):
        numbers = False  # a bound may carry a tangent, which the rule for numbers drops
    return getattr(torch.ops.cupyfused, op.name).default(*tensors, dtype=dtype, numbers=numbers)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rule(name: str) -> tuple[float, ...]:
    (op,) = [one for one in _op.OPS if one.name == name]
    return op.rule(False)


def _operands(op: Op, values: Sequence[Any], device: torch.device) -> tuple[list[Tensor | None], torch.dtype, bool]:
    """Return the operands as tensors, the dtype of the result, and whether options came as numbers.

    A number becomes a 0-dim tensor, so that a new number is not a new graph.
    """
    values = [
        value if value is None or isinstance(value, (Tensor, int, float)) else _number(op, k, value)
        for k, value in enumerate(values)
    ]
    numbers = not _op.are_tensors(values[len(op.inputs) :])
    tensors = [value if value is None or isinstance(value, Tensor) else _as_tensor(value, device) for value in values]
    return tensors, result_dtype(op, values), numbers


def _number(op: Op, place: int, value: Any) -> bool | int | float:
    number = _arrays.as_number(value)
    if number is None:
        name, kind = (*op.inputs, *op.options)[place], type(value)
        got = f"{kind.__module__}.{kind.__qualname__}"
        raise DtypeError(message(op.name, name, expected="a torch.Tensor or a number", got=got, remedy="Convert it first."))
    return number


def _as_tensor(number: bool | int | float, device: torch.device) -> Tensor:
    if isinstance(number, bool):
        return torch.ones((), dtype=torch.bool, device=device) if number else torch.zeros((), dtype=torch.bool, device=device)
    dtype = torch.int64 if isinstance(number, int) else torch.float64
    return torch.ones((), dtype=dtype, device=device) * number  # a product keeps the sign of -0.0
