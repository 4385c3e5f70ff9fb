"""The backward kernel of a plain call: its plan, kept by how the incoming gradient lies, and its launch."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _layout
from ._arrays import Operand
from ._layout import Ints, Strided
from ._op import Call, fitted
from ._plan import Described, Storage, storage
from ._promotion import TORCH_DTYPES
from ._sum_plan import SumPlan, sum_plan
from ._torch_kind import TORCH

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["Planned", "describe_gradient", "launch_backward"]

Gradients = list[Tensor | None]


class Planned:
    """A backward call, decided, with what PyTorch needs to allocate for it."""

    def __init__(self, op: Op, call: Call, plan: SumPlan | None, targets: Sequence[Described | None]):
        self.op, self.call, self.plan = op, call, plan
        self.targets = [None if one is None else _allocation(one) for one in targets]
        self.workspace = plan.workspace if plan is not None else 0
        self.workspace_dtype = TORCH_DTYPES[plan.workspace_dtype.name] if plan is not None else None

    def launched(self, grad_out: Tensor, slots: Sequence[Any]) -> Gradients:
        """Allocate the gradients and launch; `slots` are the arguments of forward as addresses and numbers."""
        allocate = grad_out.new_empty_strided
        gradients: Gradients = [None if one is None else allocate(one[0], one[1], dtype=one[2]) for one in self.targets]
        plan, call = self.plan, self.call
        if plan is None:
            return [None if one is None else one.zero_() for one in gradients]
        workspace = grad_out.new_empty(self.workspace, dtype=self.workspace_dtype) if self.workspace else None
        inputs = call.inputs
        operands, options = [grad_out.data_ptr(), *slots[:inputs]], slots[inputs:]
        pointers = [0 if one is None else one.data_ptr() for one in gradients]
        stream, scratch = TORCH.stream(call.device), 0 if workspace is None else workspace.data_ptr()
        try:
            plan.run(stream, operands, options, pointers, scratch)
        except (struct.error, OverflowError):
            fit = fitted(self.op, call, slots)
            plan.run(stream, [operands[0], *fit[:inputs]], fit[inputs:], pointers, scratch)
        return gradients


def _allocation(one: Described) -> tuple[Ints, Ints, torch.dtype]:
    assert one.dtype is not None and one.array is not None
    return one.array.shape, one.array.strides, TORCH_DTYPES[one.dtype.name]


def describe_gradient(one: Operand) -> Described:
    """A gradient lies as its input does, where that is dense, so that its memory format is kept."""
    array = one.described.array or Strided((), ())  # a 0-dim CPU tensor beside CUDA arrays
    return Described(one.described.dtype, Strided(array.shape, _layout.like_strides(array)))


def launch_backward(
    op: Op,
    call: Call,
    grad_out: Tensor,
    slots: Sequence[Any],
    places: Ints,
    saved: Sequence[Tensor],
    wanted: Sequence[bool],
    as_tensors: bool,
) -> tuple[Gradients, Planned]:
    """Launch the backward kernel; returns the gradients and the plan.

    `slots` are the arguments of forward as addresses and numbers; `saved` are those at `places`, which may lie elsewhere by now.
    `as_tensors` says how the options were given.
    """
    slots, call = _located(call, slots, places, saved)
    key = (grad_out.stride(), grad_out.data_ptr() & 15, wanted, places, as_tensors)
    planned = call.backward.get(key)
    if planned is None:
        planned = call.backward[key] = _plan(op, call, grad_out, places, wanted, as_tensors)
    return planned.launched(grad_out, slots), planned


def _located(call: Call, slots: Sequence[Any], places: Ints, saved: Sequence[Tensor]) -> tuple[list[Any], Call]:
    """Return where the saved tensors lie, and the call for that.

    Hooks that keep them elsewhere, on the CPU say, may have given back others: with another address, or other strides.
    """
    slots, lies = list(slots), True
    for k, tensor in zip(places, saved):
        described = call.operands[k].described
        if described.array is None:
            slots[k] = tensor.item()
            continue
        slots[k] = address = tensor.data_ptr()
        if address & 15 != described.alignment or tensor.stride() != described.array.strides:
            lies = False
    return slots, call if lies else _described_anew(call, places, saved)


def _described_anew(call: Call, places: Ints, saved: Sequence[Tensor]) -> Call:
    key = (places, tuple((tensor.stride(), tensor.data_ptr() & 15) for tensor in saved))
    found = call.elsewhere.get(key)
    if found is None:
        operands = list(call.operands)
        for k, tensor in zip(places, saved):
            if operands[k].described.array is not None:
                operands[k] = operands[k]._replace(described=TORCH.describe(tensor))
        found = call.elsewhere[key] = dataclasses.replace(call, operands=tuple(operands), backward={}, elsewhere={})
    return found


def _plan(op: Op, call: Call, grad_out: Tensor, places: Ints, wanted: Sequence[bool], as_tensors: bool) -> Planned:
    inputs = call.operands[: len(op.inputs)]
    targets = [describe_gradient(one) if asked else None for one, asked in zip(inputs, wanted)]
    if 0 in call.shape:
        return Planned(op, call, None, targets)
    # A tensor that was not saved is read by no wanted gradient.
    read = [
        Described() if one.typed is not None and one.described.array is not None and k not in places else one.described
        for k, one in enumerate(call.operands)
    ]
    operands = [TORCH.describe(grad_out), *read[: len(inputs)]]
    stored = _storage(call, inputs, targets)
    assert call.backend is not None
    plan = sum_plan(op, call.shape, operands, read[len(inputs) :], op.rule(as_tensors), targets, stored, call.backend)
    return Planned(op, call, plan, targets)


def _storage(call: Call, inputs: Sequence[Operand], targets: Sequence[Described | None]) -> Storage:
    """Choose the instance, which must store the gradients too.

    A number may be of any dtype, and so may the gradient of a 0-dim CPU tensor that went by value. Sums are stored in any; where
    there is one element, so that nothing is summed, the instance is told by the gradients.
    """
    stored = [one.described for one in inputs]
    if math.prod(call.shape) == 1:
        stored = [target or one for target, one in zip(targets, stored)]
    return storage(stored, call.dtype)
