"""The gates of the short cut: whether a call may go straight to a kernel, or something watches or transforms it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = [
    "in_forward_mode",
    "is_dispatching",
    "is_plain",
    "is_profiling",
    "is_transformed",
    "is_watched",
    "is_wrapped",
    "needs_gradient",
]

_functorch_level = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
_mode_count = getattr(torch._C, "_len_torch_dispatch_stack", None)
_tracing_state = getattr(torch._C, "_get_tracing_state", None)
# Wrappers of vmap and grad, and those of `autograd.grad(..., is_grads_batched=True)`, which have no level: plain types, no storage.
_wrapper_tests: list[Callable[[Tensor], bool]] = [
    getattr(torch._C._functorch, name)
    for name in ("is_functorch_wrapped_tensor", "is_legacy_batchedtensor")
    if hasattr(torch._C._functorch, name)
]
_has_gates = None not in (_functorch_level, _mode_count, _tracing_state) and hasattr(torch.autograd.forward_ad, "_current_level")


def is_watched() -> bool:
    """Whether something watches or transforms calls: a functorch level, a dual level, a dispatch mode, or jit tracing.

    Each of these would see only the allocation of the result if the kernel were launched behind its back, and a replay would
    return uninitialised memory. The names probed are private; without one of them every call counts as watched, and the
    registered operators, which are public, carry them all.
    """
    if not _has_gates or _functorch_level() is not None or _mode_count() or _tracing_state() is not None:  # type: ignore[misc]
        return True
    return torch.autograd.forward_ad._current_level >= 0


def is_wrapped(value: Tensor) -> bool:
    """Whether a tensor of plain type is a wrapper of functorch, or of batched gradients."""
    return any(test(value) for test in _wrapper_tests)


def is_plain(values: Sequence[Any]) -> bool:
    """Whether all tensors are plain ones with memory: no subclass, no wrapper of functorch, no lazy sign, not meta."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if value.is_neg() or is_wrapped(value):
                return False
        elif isinstance(value, Tensor):
            return False
    return not any(isinstance(value, Tensor) and value.is_meta for value in values[:1])


def is_dispatching(value: Any) -> bool:
    """Whether a tensor is of a class that computes PyTorch's operations itself: DTensor, quantised weights, a user's wrapper.

    Not one of PyTorch's own tracers, which know the registered operators.
    """
    if not isinstance(value, Tensor) or type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    return not isinstance(value, (FakeTensor, FunctionalTensor))


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are being computed, by duals or by functorch."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def is_transformed() -> bool:
    """Whether functorch or forward mode is at work."""
    return (_functorch_level is not None and _functorch_level() is not None) or in_forward_mode()


is_profiling: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", lambda: False)


def needs_gradient(values: Sequence[Any]) -> bool:
    """Whether a gradient is asked for."""
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False
