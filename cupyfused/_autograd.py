"""The `autograd.Function` of an op: what carries the gradients of plain eager calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ._backward import Planned, describe_gradient, launch_backward
from ._composed import composed_gradients
from ._gates import is_plain, is_watched
from ._layout import Ints
from ._promotion import TORCH_DTYPES
from ._short_cut import Ready, look_alike, prepare
from ._torch import check_options, compute_reference, normalised, reference_call, reference_result

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["function", "plain_apply"]

Gradients = tuple[Tensor | None, ...]
_KEPT = 2  # backward calls of a forward call's signature: they differ in how the incoming gradient lies


@functools.cache
def function(op: Op) -> Any:
    """Return the `autograd.Function` of an op: `.apply(*inputs, *options)`, and what `prepare` returned behind if it is known."""
    name = "".join(part.capitalize() for part in op.name.split("_"))
    doc = f"Gradients of `{op.name}`: `.apply({', '.join((*op.inputs, *op.options))})`."

    def forward(ctx: Any, *args: Any) -> Tensor:  # functions, since Dynamo asks what they are
        return _forward(op, ctx, *args)

    def backward(ctx: Any, grad_out: Tensor | None) -> Gradients:
        return _backward(op, ctx, grad_out)

    body = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "__doc__": doc,
        "__module__": "cupyfused",
    }
    return type(name, (torch.autograd.Function,), body)


@functools.cache
def plain_apply(op: Op) -> Any:
    """Return `.apply` without its look for functorch's levels and wrappers, which takes 2 us and was done already."""
    return super(torch.autograd.Function, function(op)).apply


def _forward(op: Op, ctx: Any, *args: Any) -> Tensor:
    arguments = len(op.inputs) + len(op.options)
    if len(args) > arguments:
        values, (ready, slots) = args[:arguments], args[arguments:]
    else:
        values = op.complete(args)
        ready, slots = _prepared(op, values)
    needs = ctx.needs_input_grad
    places = ready.saving.get(needs)
    if places is None:
        check_options(op, values, records=True in needs)
        places = ready.saving[needs] = _places_to_save(op, values, needs)
    result = reference_result(ready, values, False) if ready.call.backend is None else ready.launched(values, slots)
    ctx.save_for_backward(*[values[k] for k in places])
    ctx.ready, ctx.slots, ctx.places = ready, slots, places
    ctx.set_materialize_grads(False)
    return result


def _prepared(op: Op, args: Sequence[Any]) -> tuple[Ready, list[Any]]:
    """Prepare a call of `.apply` itself; where it is not plain, to compute the composed expression."""
    values = normalised(args)
    prepared = None if is_watched() else prepare(op, values, "auto")
    if prepared is not None:
        return prepared[:2]
    return Ready(op, reference_call(op, values, None), values), list(values)


def _backward(op: Op, ctx: Any, grad_out: Tensor | None) -> Gradients:
    ready, inputs, needs = ctx.ready, len(op.inputs), ctx.needs_input_grad
    nothing = (None,) * (len(needs) - inputs)
    if grad_out is None:
        return (None,) * inputs + nothing
    saved = ctx.saved_tensors
    if not torch.is_grad_enabled() and not is_watched():
        for seen in ready.seen_backward:
            if seen.needs == needs and seen.check(grad_out, *saved):
                slots, bits = list(ctx.slots), grad_out.data_ptr() or 1
                for k, tensor in zip(ctx.places, saved):
                    slots[k] = address = tensor.data_ptr()
                    bits |= address or 1
                if bits & 15 == 0:
                    return (*seen.planned.launched(grad_out, slots), *nothing)
    return (*_backward_prepared(op, ctx, grad_out, saved), *nothing)


class _SeenBackward(NamedTuple):
    """A backward call that launched a kernel."""

    needs: tuple[bool, ...]
    check: Callable[..., bool]
    planned: Planned


def _backward_prepared(op: Op, ctx: Any, grad_out: Tensor, saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Launch the kernel, or compute the composed expression where one may not or the gradients are to be differentiated."""
    ready, inputs, needs = ctx.ready, len(op.inputs), ctx.needs_input_grad
    wanted = needs[:inputs]
    if torch.is_grad_enabled() or ready.call.backend is None or is_watched() or not _are_plain(ready, ctx.places, grad_out, saved):
        return _composed(op, ctx, grad_out, saved, wanted)
    gradients, planned = launch_backward(op, ready.call, grad_out, ctx.slots, ctx.places, saved, wanted, ready.as_tensors)
    for k in ready.call.items:
        if k < inputs and gradients[k] is not None:
            gradients[k] = gradients[k].cpu()  # of a 0-dim CPU tensor beside CUDA arrays, which PyTorch too waits for
    is_aligned = not any(one.data_ptr() & 15 for one in (grad_out, *saved))
    if is_aligned and not ready.call.items and (check := look_alike((grad_out, *saved))) is not None:
        ready.seen_backward.insert(0, _SeenBackward(needs, check, planned))
        del ready.seen_backward[_KEPT:]
    return gradients


def _are_plain(ready: Ready, places: Ints, grad_out: Tensor, saved: Sequence[Tensor]) -> bool:
    """Whether a kernel may read these: hooks may have given back anything for what was saved, and gradients can be sparse."""
    for k, tensor in zip(places, saved):
        kind, told = type(tensor), ready.told[k]
        if kind is not Tensor and kind is not Parameter:
            return False
        if tensor.is_neg() or (tensor.dtype, tensor.shape, tensor.device) != told:
            return False
    return is_plain((grad_out,)) and grad_out.layout is torch.strided and not grad_out._is_zerotensor()


def _composed(op: Op, ctx: Any, grad_out: Tensor, saved: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Compute gradients by PyTorch operations."""
    ready, call, values = ctx.ready, ctx.ready.call, list(ctx.slots)
    for k in ready.blank:
        values[k] = None
    for k, tensor in zip(ctx.places, saved):
        values[k] = tensor.to(ready.told[k][0])  # which hooks may have kept in a smaller one
    for k in range(len(op.inputs)):
        if values[k] is None:
            # Not kept since no gradient reads it: a zero will do, and nothing of it reaches a second derivative.
            one = describe_gradient(call.operands[k])
            assert one.array is not None and one.dtype is not None
            blank = torch.zeros((), dtype=TORCH_DTYPES[one.dtype.name], device="cpu" if k in call.items else grad_out.device)
            values[k] = blank.expand(one.array.shape)
    return composed_gradients(lambda now: compute_reference(op, now, call.dtype), grad_out, values, wanted)


def _places_to_save(op: Op, values: Sequence[Any], needs: Sequence[bool]) -> Ints:
    """Return the places of the tensors that backward reads."""
    inputs = len(op.inputs)
    read = op.saved(needs[:inputs], any(value is not None for value in values[inputs:]))
    return tuple(k for k, value in enumerate(values) if isinstance(value, Tensor) and (k >= inputs or op.inputs[k] in read))
