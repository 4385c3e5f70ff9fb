"""The `autograd.Function` of an op: what carries the gradients of plain eager calls."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _layout
from ._arrays import Operand
from ._dtypes import Dtype, fit_number
from ._gates import is_plain, is_watched
from ._layout import Ints, Strided
from ._op import Call, are_tensors
from ._plan import Described, storage
from ._sum_plan import SumPlan, sum_plan
from ._torch import (
    TORCH,
    TORCH_DTYPES,
    check_options,
    compute_reference,
    eager_forward,
    find,
    normalised,
    runs_kernel,
    signature,
)

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["composed_gradients", "eager_backward", "function"]

Gradients = list[Tensor | None]


@functools.cache
def function(op: Op) -> Any:
    """Return the `autograd.Function` of an op: `.apply(*inputs, *options)`, with "auto" or another `impl` behind if wanted."""
    inputs, arguments = len(op.inputs), len(op.inputs) + len(op.options)

    def forward(ctx: Any, *args: Any) -> Tensor:
        values, impl = normalised(args[:arguments]), args[arguments] if len(args) > arguments else "auto"
        if True in ctx.needs_input_grad[inputs:arguments]:
            check_options(op, values)
        if runs_kernel(op, values[0], impl):
            result, call = eager_forward(op, values, impl)
        else:
            result = compute_reference(op, values)
            call = find(op, values, "reference", signature(values, ("reference", None, None), memory=False)[0])
        places = call.saving.get(ctx.needs_input_grad)
        if places is None:
            places = call.saving[ctx.needs_input_grad] = _places_to_save(op, values, ctx.needs_input_grad)
        ctx.save_for_backward(*[values[k] for k in places])
        ctx.numbers = [None if isinstance(value, Tensor) else value for value in values]
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(False)
        return result

    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (len(ctx.needs_input_grad) - inputs)
        if grad_out is None:
            return (None,) * inputs + nothing
        values = ctx.numbers.copy()
        for k, tensor in zip(ctx.places, ctx.saved_tensors):
            values[k] = tensor
        wanted = ctx.needs_input_grad[:inputs]
        if torch.is_grad_enabled() or ctx.call.backend is None or is_watched() or not is_plain((grad_out, *values)):
            return (*composed_gradients(op, ctx.call, grad_out, values, wanted), *nothing)
        gradients = eager_backward(op, ctx.call, grad_out, values, wanted)
        for k in ctx.call.items:
            if k < inputs and gradients[k] is not None:
                gradients[k] = gradients[k].cpu()  # of a 0-dim CPU tensor beside CUDA arrays, which PyTorch too waits for
        return (*gradients, *nothing)

    name = "".join(part.capitalize() for part in op.name.split("_"))
    doc = f"Gradients of `{op.name}`: `.apply({', '.join((*op.inputs, *op.options))})`."
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__doc__": doc, "__module__": "cupyfused"}
    return type(name, (torch.autograd.Function,), body)


def _places_to_save(op: Op, values: Sequence[Any], needs: Sequence[bool]) -> Ints:
    """Return the places of the tensors that backward reads."""
    inputs = len(op.inputs)
    read = op.saved(needs[:inputs], any(value is not None for value in values[inputs:]))
    return tuple(k for k, value in enumerate(values) if isinstance(value, Tensor) and (k >= inputs or op.inputs[k] in read))


# ---- the kernel ---------------------------------------------------------------------------------------------------------


class _Target:
    """How one gradient is allocated."""

    def __init__(self, one: Described):
        assert one.dtype is not None and one.array is not None
        self.shape: Ints = one.array.shape
        self.strides: Ints = one.array.strides
        self.dtype = TORCH_DTYPES[one.dtype.name]

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def _describe_gradient(one: Operand) -> Described:
    """A gradient lies as its input does, where that is dense, so that its memory format is kept."""
    array = one.described.array or Strided((), ())  # a 0-dim CPU tensor beside CUDA arrays
    return Described(one.described.dtype, Strided(array.shape, _layout.like_strides(array)))


def eager_backward(
    op: Op, call: Call, grad_out: Tensor, values: Sequence[Any], wanted: Sequence[bool], as_tensors: bool | None = None
) -> Gradients:
    """Launch the backward kernel; `values` are the arguments, None for an input that no wanted gradient reads.

    `as_tensors` says how the options were given, where it is not how they come.
    """
    address = grad_out.data_ptr()
    key = (grad_out.stride(), address & 15, tuple(wanted), as_tensors is None)
    planned = call.backward.get(key)
    if planned is None:
        planned = call.backward[key] = _plan(op, call, grad_out, values, wanted)
    plan, targets = planned
    if plan is None:
        return [None if one is None else one.empty(grad_out.device).zero_() for one in targets]
    gradients = [None if one is None else one.empty(grad_out.device) for one in targets]
    workspace = (
        torch.empty(plan.workspace, dtype=TORCH_DTYPES[plan.workspace_dtype.name], device=grad_out.device)
        if plan.workspace
        else None
    )
    slots = [_slot(value) for value in values]
    for k in call.items:
        if values[k] is not None:
            slots[k] = values[k].item()
    inputs = len(op.inputs)
    as_tensors = are_tensors(values[inputs:]) if as_tensors is None else as_tensors
    operands, scalars = [address, *slots[:inputs]], [*slots[inputs:], *op.rule(as_tensors)]
    pointers = [0 if one is None else one.data_ptr() for one in gradients]
    stream, scratch = TORCH.stream(call.device), 0 if workspace is None else workspace.data_ptr()
    try:
        plan.run(stream, operands, scalars, pointers, scratch)
    except (struct.error, OverflowError):
        plan.run(stream, _fit(operands, call.dtype), _fit(scalars, call.dtype), pointers, scratch)
    return gradients


def _slot(value: Any) -> int | float:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value


def _fit(slots: Sequence[int | float], dtype: Dtype) -> list[int | float]:
    return [fit_number(slot, dtype) if isinstance(slot, float) else slot for slot in slots]


def _plan(
    op: Op, call: Call, grad_out: Tensor, values: Sequence[Any], wanted: Sequence[bool]
) -> tuple[SumPlan | None, list[_Target | None]]:
    inputs = call.operands[: len(op.inputs)]
    described = [_describe_gradient(one) if asked else None for one, asked in zip(inputs, wanted)]
    targets = [None if one is None else _Target(one) for one in described]
    if 0 in call.shape:
        return None, targets
    geometry = TORCH.read(grad_out)
    operands = [Described(call.dtype, Strided(geometry.shape, geometry.strides), geometry.address % 16)]
    described_values = [Described() if value is None else one.described for value, one in zip(values, call.operands)]
    operands += described_values[: len(inputs)]
    scalars = described_values[len(inputs) :] + [Described(call.dtype)] * len(op.backward_numbers)
    stored = storage([one.described for one in inputs], call.dtype)
    assert call.backend is not None
    return sum_plan(op, call.shape, operands, scalars, described, stored, call.backend), targets


# ---- the composed expression --------------------------------------------------------------------------------------------


def composed_gradients(op: Op, call: Call, grad_out: Tensor, values: Sequence[Any], wanted: Sequence[bool]) -> Gradients:
    """Compute the gradients by PyTorch operations; with grad mode on they can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        arguments = list(values)
        for k, (value, asked) in enumerate(zip(values, wanted)):
            if value is None:
                # Not kept since no gradient reads it: any value will do, and nothing of it reaches a second derivative.
                one = _describe_gradient(call.operands[k])
                assert one.array is not None and one.dtype is not None
                blank = torch.zeros((), dtype=TORCH_DTYPES[one.dtype.name], device="cpu" if k in call.items else grad_out.device)
                arguments[k] = blank.expand(one.array.shape).requires_grad_(asked)
            elif asked:
                # An alias of its own, so that a tensor passed twice gets each place's gradient once.
                arguments[k] = value.view_as(value) if create_graph else value.detach().requires_grad_()
        y = compute_reference(op, arguments, call.dtype)
        asked_for = [one for one, asked in zip(arguments, wanted) if asked]
        found = iter(torch.autograd.grad(y, asked_for, grad_out, create_graph=create_graph))
    return [next(found) if asked else None for asked in wanted]
