"""Who may be timed: results and gradients are compared with composed PyTorch in float64 first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .cases import BOUNDS

__all__ = ["composed", "difference"]

# Relative to values of about 1; composed 16-bit operations round three times, at intermediates of up to 20.
_TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def composed(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Compute the expression by PyTorch's own operations."""
    return torch.clamp(x * scale + bias, *BOUNDS)


def difference(call: Callable[..., Tensor], operands: Sequence[Tensor], gradients: bool) -> str:
    """Return how a call's values differ from those of float64, "" where they do not.

    Parameters
    ----------
    call
        Takes x, scale and bias and returns the result.
    operands
        What it is called with; what is timed afterwards.
    gradients
        Whether the call records a graph whose gradients are compared too.
    """
    tolerance = _TOLERANCES[operands[0].dtype]
    exact_leaves = [one.detach().double().requires_grad_() for one in operands]
    exact = composed(*exact_leaves)
    leaves = [one.detach().requires_grad_(gradients) for one in operands]
    y = call(*leaves)
    problem = _difference("the result", y.detach(), exact.detach(), tolerance)
    if problem or not gradients:
        return problem
    grad_out = torch.randn_like(exact, dtype=y.dtype)
    with torch.no_grad():
        value = exact_leaves[0] * exact_leaves[1] + exact_leaves[2]
        for bound in BOUNDS:  # where rounding decides which side of a bound a value is on, either gradient is right
            grad_out.masked_fill_((value - bound).abs() <= tolerance, 0)
        del value
    found = torch.autograd.grad(y, leaves, grad_out)
    expected = torch.autograd.grad(exact, exact_leaves, grad_out.double())
    names = ("the gradient of x", "the gradient of scale", "the gradient of bias")
    problems = (_difference(name, one, right, tolerance, exact.numel()) for name, one, right in zip(names, found, expected))
    return next(filter(None, problems), "")


def _difference(what: str, found: Tensor, exact: Tensor, tolerance: float, elements: int = 0) -> str:
    if found.shape != exact.shape:
        return f"{what} has the shape {tuple(found.shape)}, not {tuple(exact.shape)}"
    spread = math.sqrt(max(elements / max(exact.numel(), 1), 1))  # of a sum of random terms, whose own value may be near 0
    error = (found.double() - exact).abs_()
    if bool((error <= tolerance * (spread + exact.abs())).all()):  # false for a NaN
        return ""
    return f"{what} is off by {float(error.max()):.3g}"
