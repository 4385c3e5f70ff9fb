"""The `autograd.Function` of an op: what carries the gradients of plain eager calls."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _layout
from ._arrays import Operand
from ._composed import composed_gradients
from ._dtypes import Dtype, fit_number
from ._gates import is_plain, is_watched
from ._layout import Ints, Strided
from ._op import Call, are_tensors
from ._plan import Described, storage
from ._promotion import TORCH_DTYPES
from ._sum_plan import SumPlan, sum_plan
from ._torch import (
    check_options,
    compute_reference,
    eager_forward,
    find,
    normalised,
    runs_kernel,
    signature,
)
from ._torch_kind import TORCH

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["eager_backward", "function"]

Gradients = list[Tensor | None]


@functools.cache
def function(op: Op) -> Any:
    """Return the `autograd.Function` of an op: `.apply(*inputs, *options)`, with `impl` and the result's dtype behind if wanted."""
    name = "".join(part.capitalize() for part in op.name.split("_"))
    doc = f"Gradients of `{op.name}`: `.apply({', '.join((*op.inputs, *op.options))})`."
    body = {
        "forward": staticmethod(functools.partial(_forward, op)),
        "backward": staticmethod(functools.partial(_backward, op)),
        "__doc__": doc,
        "__module__": "cupyfused",
    }
    return type(name, (torch.autograd.Function,), body)


def _forward(op: Op, ctx: Any, *args: Any) -> Tensor:
    inputs, arguments = len(op.inputs), len(op.inputs) + len(op.options)
    values, (impl, dtype) = normalised(args[:arguments]), args[arguments:] or ("auto", None)
    if True in ctx.needs_input_grad[inputs:arguments]:
        check_options(op, values)
    if runs_kernel(op, values[0], impl):
        result, call = eager_forward(op, values, impl, dtype)
    else:
        result = compute_reference(op, values, dtype)
        call = find(op, values, "reference", signature(values, ("reference", None, dtype), memory=False)[0], dtype)
    places = call.saving.get(ctx.needs_input_grad)
    if places is None:
        places = call.saving[ctx.needs_input_grad] = _places_to_save(op, values, ctx.needs_input_grad)
    ctx.save_for_backward(*[values[k] for k in places])
    ctx.numbers = [None if isinstance(value, Tensor) else value for value in values]
    ctx.call, ctx.places = call, places
    ctx.set_materialize_grads(False)
    return result


def _backward(op: Op, ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs = len(op.inputs)
    nothing = (None,) * (len(ctx.needs_input_grad) - inputs)
    if grad_out is None:
        return (None,) * inputs + nothing
    values, call = ctx.numbers.copy(), ctx.call
    for k, tensor in zip(ctx.places, ctx.saved_tensors):
        values[k] = tensor
    wanted = ctx.needs_input_grad[:inputs]
    if torch.is_grad_enabled() or call.backend is None or is_watched() or not is_plain((grad_out, *values)):
        whole = _with_blanks(call, grad_out, values, inputs)
        return (*composed_gradients(lambda now: compute_reference(op, now, call.dtype), grad_out, whole, wanted), *nothing)
    for k in ctx.places:
        if not _lies_as_described(values[k], call.operands[k]):
            call = _described_anew(call, values)
            break
    gradients = eager_backward(op, call, grad_out, values, wanted)
    for k in call.items:
        if k < inputs and gradients[k] is not None:
            gradients[k] = gradients[k].cpu()  # of a 0-dim CPU tensor beside CUDA arrays, which PyTorch too waits for
    return (*gradients, *nothing)


def _places_to_save(op: Op, values: Sequence[Any], needs: Sequence[bool]) -> Ints:
    """Return the places of the tensors that backward reads."""
    inputs = len(op.inputs)
    read = op.saved(needs[:inputs], any(value is not None for value in values[inputs:]))
    return tuple(k for k, value in enumerate(values) if isinstance(value, Tensor) and (k >= inputs or op.inputs[k] in read))


def _lies_as_described(value: Tensor, one: Operand) -> bool:
    """Whether a saved tensor lies as it did: hooks that keep it elsewhere, on the CPU say, may give back other strides."""
    array = one.described.array
    return array is None or (value.stride() == array.strides and value.data_ptr() % 16 == one.described.alignment)


def _described_anew(call: Call, values: Sequence[Any]) -> Call:
    """Return the call for saved tensors that lie elsewhere now."""
    key = tuple((value.stride(), value.data_ptr() % 16) if isinstance(value, Tensor) else None for value in values)
    found = call.elsewhere.get(key)
    if found is None:
        operands = [
            one._replace(described=TORCH.describe(value)) if isinstance(value, Tensor) and one.described.array else one
            for value, one in zip(values, call.operands)
        ]
        found = call.elsewhere[key] = dataclasses.replace(call, operands=tuple(operands), backward={}, elsewhere={})
    return found


def _with_blanks(call: Call, grad_out: Tensor, values: Sequence[Any], inputs: int) -> list[Any]:
    """Stand a zero in for each input that was not kept since no gradient reads it; nothing of it reaches a second derivative."""
    whole = list(values)
    for k, value in enumerate(values[:inputs]):
        if value is None:
            one = _describe_gradient(call.operands[k])
            assert one.array is not None and one.dtype is not None
            blank = torch.zeros((), dtype=TORCH_DTYPES[one.dtype.name], device="cpu" if k in call.items else grad_out.device)
            whole[k] = blank.expand(one.array.shape)
    return whole


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
    operands = [TORCH.describe(grad_out)]
    described_values = [Described() if value is None else one.described for value, one in zip(values, call.operands)]
    operands += described_values[: len(inputs)]
    scalars = described_values[len(inputs) :] + [Described(call.dtype)] * len(op.backward_numbers)
    stored = storage([one.described for one in inputs], call.dtype)
    assert call.backend is not None
    return sum_plan(op, call.shape, operands, scalars, described, stored, call.backend), targets
