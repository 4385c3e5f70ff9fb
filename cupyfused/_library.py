"""`torch.ops.cupyfused.*`: every op registered with PyTorch, for torch.compile, tracing, fake tensors and direct calls.

The low-level Library API with schemas written out: a registered call costs 13 us there and 28 us through
`torch.library.custom_op` (H200 host, torch 2.11). The Autograd key has a kernel of our own, since formulas given to
`register_autograd` return zero tangents, silently, under `torch.func.jvp` and forward-mode duals.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from . import _autograd, _batching, _op, _torch
from ._backward import launch_backward
from ._composed import composed_gradients, decomposed
from ._gates import in_forward_mode, is_transformed, is_wrapped
from ._op import Op
from ._promotion import DTYPES, autocasts, result_dtype
from ._short_cut import prepare, without_class
from .errors import OperandError, message

__all__ = ["register"]

# PyTorch asks `inspect` in which module a fake kernel is registered, which looks through all modules there are and so imports what
# their lazy attributes stand for: 0.2 s of a first result on an H200's host. Here it finds the answer in its cache.
getattr(inspect, "modulesbyfile", {})[os.path.abspath(__file__)] = __name__

_library = torch.library.Library("cupyfused", "FRAGMENT")  # kept here: an op is gone with the library object that made it
_registered: set[str] = set()
# The dispatch keys of a thread that nothing watches.
with ThreadPoolExecutor(1) as _thread:
    _untouched = _thread.submit(
        lambda: (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
    ).result()
_AUTOCAST = ("AutocastCUDA", "AutocastCPU")


def register(op: Op) -> None:
    """Register an op and its backward; doing it again does nothing."""
    if op.name in _registered:
        return
    _registered.add(op.name)
    optional = [f"Tensor? {name}" for name in op.options]
    operands = ", ".join([f"Tensor {name}" for name in op.inputs] + [f"{one}=None" for one in optional])
    _library.define(f"{op.name}({operands}, *, ScalarType? dtype=None, bool numbers=False) -> Tensor", tags=_tags("pointwise"))
    operands = ", ".join(["Tensor grad_out"] + [f"Tensor {name}" for name in op.inputs] + optional)
    results = ", ".join("Tensor?" for _ in op.inputs)
    _library.define(f"{op.name}_backward({operands}, *, bool[] mask, bool numbers) -> ({results})", tags=_tags())
    for name, kernel, fake, autograd, batched in (
        (op.name, _forward, _forward_fake, _forward_autograd, _batching.forward_rule),
        (f"{op.name}_backward", _backward, _backward_fake, _backward_autograd, _batching.backward_rule),
    ):
        _library.impl(name, functools.partial(kernel, op), "CompositeExplicitAutograd")
        _library.impl(name, functools.partial(autograd, op), "Autograd")
        torch.library.register_fake(f"cupyfused::{name}", functools.partial(fake, op), lib=_library)
        torch.library.register_vmap(f"cupyfused::{name}", functools.partial(batched, op), lib=_library)
    if op.autocast != "none":
        for key in _AUTOCAST:
            _library.impl(op.name, functools.partial(_forward_autocast, op), key)


def _tags(*names: str) -> tuple[Any, ...]:
    """`flexible_layout`: kernels take any strides, so that nothing need be copied into the strides of the trace."""
    names = ("pt2_compliant_tag", "flexible_layout", *names)
    return tuple(getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name))


def _overload(name: str) -> Any:
    return getattr(torch.ops.cupyfused, name).default


def _rule(op: Op, numbers: bool) -> tuple[float, ...] | None:
    return op.rule(False) if numbers else None


# ---- forward ------------------------------------------------------------------------------------------------------------


def _forward(op: Op, *values: Any, dtype: torch.dtype | None = None, numbers: bool = False) -> Tensor:
    values = op.complete(values)
    override = None if dtype is None else DTYPES[dtype]
    if _torch.runs_kernel(op, values[0], "auto"):
        return _torch.eager_forward(op, values, override)
    return _torch.compute_reference(op, values, override)


def _forward_fake(op: Op, *values: Any, dtype: torch.dtype | None = None, numbers: bool = False) -> Tensor:
    y: Tensor = op.reference(torch, *op.complete(values))
    return y if dtype is None else y.to(dtype)


def _forward_autocast(op: Op, *values: Any, dtype: torch.dtype | None = None, numbers: bool = False) -> Tensor:
    values = op.complete(values)
    device_type = values[0].device.type
    if dtype is None and autocasts(op, device_type):
        dtype = result_dtype(op, values)
    with torch.autocast(device_type, enabled=False):
        return _overload(op.name)(*values, dtype=dtype, numbers=numbers)  # type: ignore[no-any-return]


def _forward_autograd(op: Op, *values: Any, dtype: torch.dtype | None = None, numbers: bool = False) -> Tensor:
    values = op.complete(values)
    _torch.check_options(op, values)
    if in_forward_mode():
        # PyTorch differentiates its own operations at every level; a Function gives 0 where two forward levels are open.
        return decomposed(op, values, dtype or result_dtype(op, values), _rule(op, numbers))
    with enable_single_level_autograd_function():
        return _function(op, _Registered).apply(op, torch.is_grad_enabled(), dtype, numbers, *values)  # type: ignore[no-any-return]


# ---- backward -----------------------------------------------------------------------------------------------------------


def _returned(gradients: Sequence[Tensor | None]) -> Any:
    """Return gradients as an operator does: several as a tuple, one as itself."""
    return tuple(gradients) if len(gradients) > 1 else gradients[0]


def _backward(op: Op, grad_out: Tensor, *values: Any, mask: Sequence[bool], numbers: bool) -> Any:
    if not _torch.runs_kernel(op, values[0], "auto"):
        with torch.no_grad(), torch._C._ForceDispatchKeyGuard(*_untouched):  # autograd is switched off below its own kernels
            found = _composed(op, grad_out, *values, mask=mask, numbers=numbers)
        return _returned([None if one is None else torch.empty_like(value).copy_(one) for one, value in zip(found, values)])
    plain = [without_class(value) for value in (grad_out, *values)]
    prepared = prepare(op, plain[1:], "auto", DTYPES[grad_out.dtype])
    assert prepared is not None
    _check_backward(op, grad_out, values, mask, prepared[0].call.shape)
    places = tuple(k for k, value in enumerate(values) if value is not None)
    saved = [plain[1 + k] for k in places]
    gradients, _ = launch_backward(op, prepared[0].call, plain[0], prepared[1], places, saved, tuple(mask), not numbers)
    return _returned([one if one is None else one.to(value.device) for one, value in zip(gradients, values)])


def _check_backward(op: Op, grad_out: Tensor, values: Sequence[Any], mask: Sequence[bool], shape: Sequence[int]) -> None:
    """Refuse what would have a kernel read or write beside its arrays; autograd asks for nothing of the kind."""
    if tuple(grad_out.shape) != tuple(shape) or not grad_out.is_floating_point() or grad_out.device != values[0].device:
        got = f"{tuple(grad_out.shape)} {grad_out.dtype} on {grad_out.device}"
        expected = f"a floating point gradient of shape {tuple(shape)} on {values[0].device}"
        raise OperandError(
            message(f"{op.name}_backward", "grad_out", expected=expected, got=got, remedy="Pass that of the result.")
        )
    integers = [name for name, value, asked in zip(op.inputs, values, mask) if asked and not value.is_floating_point()]
    if len(mask) != len(op.inputs) or integers:
        expected = f"{len(op.inputs)} flags, False for integer inputs"
        raise OperandError(
            message(f"{op.name}_backward", "mask", expected=expected, got=f"{list(mask)}", remedy="Pass such flags.")
        )


def _composed(op: Op, grad_out: Tensor, *values: Any, mask: Sequence[bool], numbers: bool) -> tuple[Tensor | None, ...]:
    rule = _rule(op, numbers)
    return tuple(composed_gradients(lambda now: decomposed(op, now, grad_out.dtype, rule), grad_out, values, mask))


def _backward_fake(op: Op, grad_out: Tensor, *values: Any, mask: Sequence[bool], numbers: bool) -> Any:
    return _returned([torch.empty_like(value) if asked else None for value, asked in zip(values, mask)])


def _backward_autograd(op: Op, grad_out: Tensor, *values: Any, mask: Sequence[bool], numbers: bool) -> Any:
    if in_forward_mode():
        remedy = f"Differentiate cupyfused::{op.name} itself, which has forward mode."
        raise OperandError(
            message(f"{op.name}_backward", "grad_out", expected="no forward-mode derivative", got="one", remedy=remedy)
        )
    with enable_single_level_autograd_function():
        return _function(op, _RegisteredBackward).apply(op, torch.is_grad_enabled(), mask, numbers, grad_out, *values)


# ---- autograd -----------------------------------------------------------------------------------------------------------


class _Registered(_SingleLevelFunction):
    """Gradients of a registered op at the level of autograd or functorch that is being computed; others lie below the call."""

    @staticmethod
    def forward(ctx: Any, op: Op, grad_mode: bool, dtype: torch.dtype | None, numbers: bool, *values: Any) -> Tensor:
        ctx.op, ctx.numbers = op, numbers
        ctx.save_for_backward(*values)
        # A Function switches recording off for its forward; the levels below record if the caller does.
        with torch.set_grad_enabled(grad_mode), torch._C._AutoDispatchBelowAutograd():
            return _overload(op.name)(*values, dtype=dtype, numbers=numbers)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        op, inputs = ctx.op, len(ctx.op.inputs)
        composed = in_forward_mode() or (is_wrapped(grad_out) and not is_transformed())
        compute = functools.partial(_composed, op) if composed else _overload(f"{op.name}_backward")
        gradients = compute(grad_out, *ctx.saved_tensors, mask=ctx.needs_input_grad[4 : 4 + inputs], numbers=ctx.numbers)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return (None, None, None, None, *gradients, *(None,) * len(op.options))


class _RegisteredBackward(_SingleLevelFunction):
    """Gradients of the gradients, by the composed expression, and only if they are asked for."""

    @staticmethod
    def forward(ctx: Any, op: Op, grad_mode: bool, mask: Sequence[bool], numbers: bool, *values: Any) -> tuple[Tensor | None, ...]:
        ctx.op, ctx.mask, ctx.numbers = op, mask, numbers
        ctx.save_for_backward(*values)
        with torch.set_grad_enabled(grad_mode), torch._C._AutoDispatchBelowAutograd():
            return _overload(f"{op.name}_backward")(*values, mask=mask, numbers=numbers)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        op, values = ctx.op, ctx.saved_tensors
        asked = [given for given, one in zip(grad_gradients, ctx.mask) if one]

        def inner(chosen: Sequence[Any]) -> tuple[Tensor, ...]:
            found = _composed(op, *chosen, mask=ctx.mask, numbers=ctx.numbers)
            return tuple(one for one in found if one is not None)

        gradients = composed_gradients(inner, tuple(asked), values, ctx.needs_input_grad[4:])
        return (None, None, None, None, *gradients)


@functools.cache
def _function(op: Op, of: Any) -> Any:
    """Return the class of an op, so that graphs and profiles show its name."""
    return type(of.__name__.removeprefix("_") + _autograd.function(op).__name__, (of,), {})


for _known in _op.OPS:
    register(_known)
_op.register_with_torch, _op.tensor_class, _op.torch_call = register, Tensor, _torch.call
