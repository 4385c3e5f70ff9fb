"""A sign changed, or a factor lost, in the CUDA text of an op turns the suite red: each mutant fails the comparison that the
contract makes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator

import pytest
import torch

from cupyfused import _op
from cupyfused._op import Op
from cupyfused.ops import fused_scale_bias, fused_scale_bias_clamp

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are built for the CPU by g++")

MUTATIONS = [
    (fused_scale_bias.OP, "grad_x = grad_out * scale;", "grad_x = -grad_out * scale;"),
    (fused_scale_bias.OP, "grad_scale = grad_out * x;", "grad_scale = grad_out * scale;"),
    (fused_scale_bias.OP, "grad_bias = grad_out;", "grad_bias = -grad_out;"),
    (fused_scale_bias.OP, "multiply_add(x, scale, bias)", "multiply_add(x, scale, -bias)"),
    (fused_scale_bias_clamp.OP, "grad_x = g * scale;", "grad_x = -g * scale;"),
    (fused_scale_bias_clamp.OP, "grad_scale = g * x;", "grad_scale = -g * x;"),
    (fused_scale_bias_clamp.OP, "grad_bias = g;", "grad_bias = grad_out;"),
    (fused_scale_bias_clamp.OP, "(seen >= first) & (seen <= last)", "(seen >= first) | (seen <= last)"),
    (fused_scale_bias_clamp.OP, "return clamp(multiply_add", "return (multiply_add"),
]


def _agrees_with_torch(op: Op) -> bool:
    """Forward and gradients of an op's host kernels against the composed expression."""
    x, scale, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 24), (7, 1), (24,)))
    bounds = (-0.5, 0.75)[: len(op.options)]
    composed = x * scale + bias
    composed = composed.clamp(*bounds) if bounds else composed
    y = op(x, scale, bias, *bounds, impl="host")
    grad_out = torch.randn_like(y)
    pairs = zip(torch.autograd.grad(y, (x, scale, bias), grad_out), torch.autograd.grad(composed, (x, scale, bias), grad_out))
    return torch.allclose(y, composed) and all(torch.allclose(ours, theirs) for ours, theirs in pairs)


@pytest.fixture
def mutant(request: pytest.FixtureRequest) -> Iterator[Op]:
    op, found, put = request.param
    assert op.functor.count(found) == 1, f"{found!r} is no longer in the text of {op.name}"
    text = op.functor.replace(found, put).replace(
        "return (multiply_add(x, scale, bias), min_val, max_val);", "return multiply_add(x, scale, bias);"
    )
    changed = dataclasses.replace(op, text=text, calls={})
    yield changed
    _op.OPS.remove(changed)


@pytest.mark.parametrize("mutant", MUTATIONS, indirect=True, ids=[f"{op.name}-{put}" for op, _, put in MUTATIONS])
def test_a_mutant_is_caught(mutant: Op) -> None:
    assert not _agrees_with_torch(mutant)


@pytest.mark.parametrize("op", [fused_scale_bias.OP, fused_scale_bias_clamp.OP], ids=lambda op: op.name)
def test_the_real_text_agrees(op: Op) -> None:
    assert _agrees_with_torch(op)
