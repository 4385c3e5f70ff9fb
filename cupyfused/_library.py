"""`torch.ops.cupyfused.*`: every op registered with PyTorch, for torch.compile, tracing, fake tensors and direct calls.

The low-level Library API with schemas written out: a registered call costs 13 us there and 28 us through
`torch.library.custom_op` (H200 host, torch 2.11). The Autograd key has a kernel of our own, since formulas given to
`register_autograd` return zero tangents, silently, under `torch.func.jvp` and forward-mode duals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _arrays, _autograd, _op, _torch
from ._dtypes import Dtype, Rank, Typed, fold_types, number_dtype
from ._op import Op

__all__ = ["register", "traced_call"]

_library = torch.library.Library("cupyfused", "FRAGMENT")  # kept here: an op is gone with the library object that made it
_registered: set[str] = set()


def register(op: Op) -> None:
    """Register an op and its backward; doing it again does nothing."""
    if op.name in _registered:
        return
    _registered.add(op.name)
    tensors = [*(f"Tensor {name}" for name in op.inputs), *(f"Tensor? {name}=None" for name in op.options)]
    _library.define(f"{op.name}({', '.join(tensors)}, *, ScalarType? dtype=None, bool numbers=False) -> Tensor", tags=_tags())
    needed = [*(f"Tensor {name}" for name in op.inputs), *(f"Tensor? {name}" for name in op.options)]
    results = ", ".join("Tensor?" for _ in op.inputs)
    _library.define(f"{op.name}_backward(Tensor grad_out, {', '.join(needed)}, *, bool[] mask, bool numbers) -> ({results})")
    for name, kernel, fake in (
        (op.name, functools.partial(_forward, op), functools.partial(_forward_fake, op)),
        (f"{op.name}_backward", functools.partial(_backward, op), functools.partial(_backward_fake, op)),
    ):
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cupyfused::{name}", fake, lib=_library)
    _library.impl(op.name, _autograd_kernel(op), "Autograd")


def _tags() -> tuple[Any, ...]:
    names = ("pt2_compliant_tag", "pointwise")
    return tuple(getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name))


def traced_call(op: Op, values: Sequence[Any]) -> Tensor:
    """Call the registered op: numbers become 0-dim tensors, so that a new number is not a new graph."""
    values = [value if value is None or isinstance(value, (Tensor, int, float)) else _arrays.as_number(value) for value in values]
    tensors = [value if value is None or isinstance(value, Tensor) else _as_tensor(value) for value in values]
    numbers = not _op.are_tensors(values[len(op.inputs) :])
    overload = getattr(torch.ops.cupyfused, op.name).default
    return overload(*tensors, dtype=_result_dtype(op, values), numbers=numbers)  # type: ignore[no-any-return]


def _as_tensor(number: bool | int | float) -> Tensor:
    dtype = torch.bool if isinstance(number, bool) else torch.int64 if isinstance(number, int) else torch.float64
    return torch.zeros((), dtype=dtype) + number if dtype != torch.bool else torch.tensor(number)


def _result_dtype(op: Op, values: Sequence[Any]) -> torch.dtype:
    """Fold promotion over the operands; from their dtypes alone, so that Dynamo can follow."""
    default = _torch.DTYPES[torch.get_default_dtype()]
    inputs = [_typed(value, default) for value in values[: len(op.inputs)]]
    options = [_typed(value, default) for value in values[len(op.inputs) :] if value is not None]
    return _torch.TORCH_DTYPES[fold_types(inputs, options).name]


def _typed(value: Any, default: Dtype) -> Typed:
    if isinstance(value, Tensor):
        return Typed(_torch.DTYPES[value.dtype], Rank.ARRAY if value.dim() else Rank.ZERO_DIM)
    return Typed(number_dtype(value, default), Rank.NUMBER)


# ---- kernels ------------------------------------------------------------------------------------------------------------


def _number_options(op: Op, values: Sequence[Any], numbers: bool) -> list[Any]:
    """Return options that came as numbers to what they were: their gradient at a bound can differ from a tensor's."""
    inputs = len(op.inputs)
    if not numbers:
        return list(values)
    return [
        value.item() if k >= inputs and isinstance(value, Tensor) and value.device.type == "cpu" else value
        for k, value in enumerate(values)
    ]


def _forward(op: Op, *values: Any, dtype: torch.dtype | None = None, numbers: bool = False) -> Tensor:
    values = _complete(op, values)
    override = None if dtype is None else _torch.DTYPES[dtype]
    if _torch.runs_kernel(op, values[0], "auto"):
        return _torch.eager_forward(op, values, "auto", override)[0]
    return _torch.compute_reference(op, values, override)


def _complete(op: Op, values: Sequence[Any]) -> tuple[Any, ...]:
    return (*values, *(None,) * (len(op.inputs) + len(op.options) - len(values)))


def _forward_fake(op: Op, *values: Any, dtype: torch.dtype | None = None, numbers: bool = False) -> Tensor:
    y: Tensor = op.reference(torch, *_complete(op, values))
    return y if dtype is None else y.to(dtype)


def _backward(op: Op, grad_out: Tensor, *values: Any, mask: Sequence[bool], numbers: bool) -> tuple[Tensor | None, ...]:
    dtype = _torch.DTYPES[grad_out.dtype]
    if _torch.runs_kernel(op, values[0], "auto"):
        key, _ = _torch.signature(values, ("auto", _op.cpu_impl, dtype))
        call = _torch.find(op, values, "auto", key, dtype)
        gradients = _autograd.eager_backward(op, call, grad_out, values, mask, not numbers)
        return tuple(one if one is None else one.to(value.device) for one, value in zip(gradients, values))
    return tuple(
        _autograd.composed_gradients(op, _reference_call(op, values, dtype), grad_out, _number_options(op, values, numbers), mask)
    )


def _reference_call(op: Op, values: Sequence[Any], dtype: Any) -> _op.Call:
    key, _ = _torch.signature(values, ("reference", None, dtype), memory=False)
    return _torch.find(op, values, "reference", key, dtype)


def _backward_fake(op: Op, grad_out: Tensor, *values: Any, mask: Sequence[bool], numbers: bool) -> tuple[Tensor | None, ...]:
    return tuple(torch.empty_like(value) if asked else None for value, asked in zip(values, mask))


# ---- autograd -----------------------------------------------------------------------------------------------------------


def _autograd_kernel(op: Op) -> Callable[..., Tensor]:
    count, inputs = len(op.inputs) + len(op.options), len(op.inputs)
    forward = getattr(torch.ops.cupyfused, op.name).default
    backward = getattr(torch.ops.cupyfused, f"{op.name}_backward").default

    class Registered(torch.autograd.Function):
        """Gradients of a registered op; with `setup_context`, so that functorch takes it."""

        @staticmethod
        def forward(*args: Any) -> Tensor:
            *values, dtype, numbers = args
            with torch._C._AutoDispatchBelowAutograd():
                return forward(*values, dtype=dtype, numbers=numbers)  # type: ignore[no-any-return]

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            *values, _, ctx.numbers = inputs
            ctx.save_for_backward(*values)

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
            values, mask = ctx.saved_tensors, ctx.needs_input_grad[:inputs]
            numbers = ctx.numbers
            if torch.is_grad_enabled():
                call = _reference_call(op, values, _torch.DTYPES[grad_out.dtype])
                gradients = _autograd.composed_gradients(op, call, grad_out, _number_options(op, values, numbers), mask)
            else:
                gradients = backward(grad_out, *values, mask=mask, numbers=numbers)
            return (*gradients, *(None,) * (count + 2 - inputs))

    def kernel(*values: Any, dtype: torch.dtype | None = None, numbers: bool = False) -> Tensor:
        values = _complete(op, values)
        _torch.check_options(op, values)
        return Registered.apply(*values, dtype, numbers)  # type: ignore[no-any-return]

    return kernel


for _known in _op.OPS:
    register(_known)
_op.register_with_torch, _op.torch_call = register, _torch.call
