"""PyTorch: the routes by which a call reaches the kernels with its gradients.

A call takes one of three routes, chosen in `call`:

- the short cut: plain tensors in plain eager mode go straight to the plan, through an `autograd.Function` if a gradient is asked
  for. It is taken only if nothing watches or transforms the call, see `is_watched`, and every argument is plain, see `prepare`;
- whatever watches or transforms calls (functorch, forward mode, fake tensors, modes, tracing) sees the registered operator, see
  `_library`; classes that compute for themselves, DTensor say, see PyTorch's operations;
- torch.compile and torch.export see one or the other, by a setting, see `_traced`.

Loaded when the first tensor comes; importing cupyfused does not import torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _arrays, _op
from ._composed import COMPUTE, decomposed
from ._dtypes import Dtype
from ._gates import is_dispatching, is_plain, is_profiling, is_transformed, is_watched, needs_gradient
from ._op import Call
from ._out import open_out
from ._promotion import DTYPES, TORCH_DTYPES, autocasts, result_dtype
from ._short_cut import Ready, open_values, prepare, prepare_again, remember_seen, without_class
from ._torch_kind import TORCH, TORCH_UNREAD
from .errors import CudaError, OperandError, message

if TYPE_CHECKING:
    from ._op import Op

__all__ = [
    "call",
    "check_options",
    "compute_reference",
    "eager_forward",
    "no_gradients_with_out",
    "normalised",
    "reference_call",
    "reference_result",
    "runs_kernel",
]

# ---- the routes -------------------------------------------------------------------------------------------------------


def call(op: Op, values: Sequence[Any], out: Tensor | None, impl: str) -> Tensor:
    """Compute an op for a torch.Tensor, by whichever route is right."""
    if torch.compiler.is_compiling():
        from ._traced import compiled_call

        return compiled_call(op, values, out, impl)
    try:
        if out is None and not is_watched() and not is_profiling():
            again = prepare_again(op, values) if impl == "auto" else None
            if again is not None:
                ready, slots, requires_grad = again
                if ready.call.backend is not None and not requires_grad:  # the commonest call, one frame shorter
                    return ready.launched(values, slots)
                return _run(op, values, ready, slots, requires_grad)
            y = _plain_call(op, values, impl) if op.autocast == "none" else None
            if y is not None:
                return y
        return _route(op, values, out, impl)
    except RuntimeError:
        open_values(op, values, TORCH_UNREAD)  # what PyTorch refuses, a sparse tensor say, has an error of ours that names it
        raise


def _plain_call(op: Op, values: Sequence[Any], impl: str, dtype: Dtype | None = None) -> Tensor | None:
    """Compute a call of plain tensors and numbers that nothing watches; None if it is another."""
    prepared = prepare(op, values, impl, dtype)
    if prepared is None:
        return None
    if impl == "auto" and dtype is None:
        remember_seen(op, values, prepared)
    return _run(op, values, *prepared)


def _run(op: Op, values: Sequence[Any], ready: Ready, slots: list[Any], requires_grad: bool) -> Tensor:
    if ready.call.backend is None:
        if requires_grad:
            check_options(op, values)
        return reference_result(ready, values, requires_grad and torch.is_grad_enabled())
    if requires_grad and torch.is_grad_enabled():
        return ready.apply(*values, ready, slots)  # type: ignore[no-any-return]
    return ready.launched(values, slots)


def reference_result(ready: Ready, values: Sequence[Any], records: bool) -> Tensor:
    """Compute the composed expression, in place where autograd does not record it."""
    if ready.composed is not None:
        try:
            return ready.op.reference(torch, *values) if records else ready.composed.compute(*values)  # type: ignore[no-any-return]
        except (RuntimeError, OverflowError):  # a number that the dtype does not hold; or an error that comes again
            pass
    return compute_reference(ready.op, values, ready.call.dtype)


def _route(op: Op, values: Sequence[Any], out: Tensor | None, impl: str) -> Tensor:
    """Compute a call that is not as plain as can be."""
    if out is not None:
        return _call_out(op, values, out, impl)
    values = normalised(values)
    if not is_watched():
        dtype = DTYPES[result_dtype(op, values)] if autocasts(op, values[0].device.type) else None
        with torch.profiler.record_function(op.name) if is_profiling() else contextlib.nullcontext():
            y = _plain_call(op, values, impl, dtype)
        if y is not None:
            return y
    return _watched_call(op, values, impl)


def _watched_call(op: Op, values: Sequence[Any], impl: str) -> Tensor:
    """Call the registered operator, which every mode and transform knows; it does not know of `impl`."""
    check_options(op, values)
    if impl == "reference":
        return decomposed(op, values, result_dtype(op, values), None)
    device = open_values(op, values, TORCH_UNREAD)[0].device
    classes = [type(value).__name__ for value in values if is_dispatching(value)]
    if impl == "cuda":
        assert device is not None
        _op.check_on_cuda(op, device)
        if classes:
            remedy = "Leave impl out: tensors of classes with __torch_dispatch__ compute the composed expression."
            raise OperandError(message(op.name, "impl", expected="plain tensors with impl='cuda'", got=classes[0], remedy=remedy))
    if classes:
        return decomposed(op, values, result_dtype(op, values), None)
    from ._traced import registered_call

    return registered_call(op, values)


def runs_kernel(op: Op, x: Tensor, impl: str) -> bool:
    """Whether a kernel computes this call, else the composed expression."""
    if impl == "auto":
        return x.is_cuda or (x.device.type == "cpu" and _op.cpu_impl == "host")
    if impl == "reference":
        return False
    if not x.is_cuda and x.device.type != "cpu":
        raise CudaError(
            message(op.name, "impl", expected="CUDA tensors", got=f"a tensor on {x.device}", remedy="Pass impl='reference'.")
        )
    return True


def check_options(op: Op, values: Sequence[Any], records: bool | None = None) -> None:
    """Refuse an option that asks for a gradient: it would get none. `records`: whether the call is recorded, if it is known."""
    for name, value in zip(op.options, values[len(op.inputs) :]):
        if isinstance(value, Tensor) and value.requires_grad and (torch.is_grad_enabled() if records is None else records):
            remedy = f"Pass {name}.detach(); gradients are taken of {', '.join(op.inputs)} only."
            raise OperandError(
                message(op.name, name, expected="a bound without gradient", got="one with requires_grad", remedy=remedy)
            )


# ---- forward ------------------------------------------------------------------------------------------------------------


def normalised(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values with NumPy scalars as numbers, which is what they count as beside a tensor."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is float or value is None or kind is int or kind is torch.nn.Parameter or kind is bool:
            continue
        numbers = [None if isinstance(one, Tensor) else _arrays.as_number(one) for one in values]
        return tuple(one if number is None else number for one, number in zip(values, numbers))
    return values


def eager_forward(op: Op, values: Sequence[Any], dtype: Dtype | None) -> Tensor:
    """Launch the forward kernel for the registered operator; `dtype` overrides the promoted one."""
    plain = [without_class(value) for value in values]
    prepared = prepare(op, plain, "auto", dtype)
    if prepared is None:
        remedy = "Call it while the memory is there, inside the module that gathers its parameters say."
        raise OperandError(
            message(op.name, "operands", expected="tensors with memory", got="one whose storage was freed", remedy=remedy)
        )
    return prepared[0].launched(plain, prepared[1])


def no_gradients_with_out(op: Op) -> OperandError:
    """Return the error of an `out` in a call that records."""
    remedy = "Call it without out=, or under torch.no_grad()."
    return OperandError(
        message(op.name, "out", expected="no gradient to be asked for", got="an input or out with requires_grad", remedy=remedy)
    )


def _call_out(op: Op, values: Sequence[Any], out: Any, impl: str) -> Tensor:
    if needs_gradient((*values, out)):
        raise no_gradients_with_out(op)
    opened = open_out(op, TORCH if isinstance(out, Tensor) and is_plain((out,)) else TORCH_UNREAD, out)
    if is_watched() or not is_plain((*values, out)):
        remedy = "Call it without out=."
        raise OperandError(
            message(op.name, "out", expected="a plain eager call", got="a traced, transformed or subclassed one", remedy=remedy)
        )
    values = normalised(values)
    operands = open_values(op, values, TORCH)
    device = operands[0].device
    assert device is not None
    backend = _op.choose_backend(op, impl, device) if runs_kernel(op, values[0], impl) else None
    decided = _op.decide(op, operands, opened, backend)
    if decided.launch is not None:
        slots = [values[k].item() if k in decided.items else one.address or one.value or 0 for k, one in enumerate(operands)]
        _op.run(op, decided, TORCH.stream(device), out.data_ptr(), slots)
    elif backend is None:
        out.copy_(compute_reference(op, values))
    torch.autograd.graph.increment_version(out)
    return out  # type: ignore[no-any-return]


# ---- the composed expression --------------------------------------------------------------------------------------------


def compute_reference(op: Op, values: Sequence[Any], dtype: Dtype | None = None) -> Tensor:
    """Compute the op by PyTorch operations, differentiable: 16-bit floats in float32 and rounded once, like the kernels."""
    values = normalised(values)
    found = reference_call(op, values, dtype)
    result = TORCH_DTYPES[found.dtype.name]
    compute = COMPUTE.get(result, result)
    cast = [value.to(compute) if isinstance(value, Tensor) else value for value in _op.fitted(op, found, values)]
    y: Tensor = op.reference(torch, *cast).to(result)
    if y.stride() != found.strides and not is_transformed():
        # A 16-bit operand with gaps was made dense by the cast, which can change what the composed expression would return.
        y = torch.empty_strided(found.shape, found.strides, dtype=result, device=y.device).copy_(y)
    return y


def reference_call(op: Op, values: Sequence[Any], dtype: Dtype | None) -> Call:
    """Decide a call for tensors of any kind, whose memory is not looked at."""
    key: list[Any] = ["reference", dtype, torch.get_default_dtype()]
    for value in values:
        key += (value.dtype, value.shape, value.stride(), value.device) if isinstance(value, Tensor) else (type(value),)
    found = op.calls.get(tuple(key))
    if found is None:
        found = _op.decide(op, open_values(op, values, TORCH_UNREAD), None, None, dtype)
        op.remember(tuple(key), found)
    return found
