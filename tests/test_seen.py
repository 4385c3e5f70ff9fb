"""Calls that are just like one before: what one look tells, and what it must not take for the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from checks import assert_agree
from layouts import draw
from targets import Target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cupyfused
from cupyfused import OperandError, _short_cut, fused_scale_bias_clamp
from cupyfused.ops.fused_scale_bias_clamp import OP

BOUNDS = (-1.0, 1.0)


@pytest.fixture(autouse=True, params=["looked at", "prepared each time"])
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the private name of PyTorch by which a look is quick, and without it."""
    monkeypatch.setattr(OP, "seen", {})
    monkeypatch.setattr(OP, "calls", {})
    if request.param == "prepared each time":
        monkeypatch.setattr(_short_cut, "_guards", None)
    elif _short_cut._guards is None:
        pytest.skip("this PyTorch has no such name")
    return request.param == "looked at"


def leaves_of(generator: torch.Generator, target: Target, rows: int = 6) -> list[Tensor]:
    return [draw(generator, shape, torch.float32, target.device).requires_grad_() for shape in ((rows, 8), (), (8,))]


def composed(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return torch.clamp(x * scale + bias, *BOUNDS)


def check(leaves: list[Tensor]) -> None:
    """Compare values and gradients."""
    y, right = fused_scale_bias_clamp(*leaves, *BOUNDS), composed(*leaves)
    assert_agree(y.detach(), right.detach())
    grad_out = torch.randn_like(right)
    for one, expected in zip(torch.autograd.grad(y, leaves, grad_out), torch.autograd.grad(right, leaves, grad_out), strict=True):
        assert_agree(one, expected)


def test_the_same_again_with_other_values(target: Target, generator: torch.Generator, look: bool) -> None:
    for _ in range(4):
        check(leaves_of(generator, target))
    assert sum(map(len, OP.seen.values())) == int(look)


def test_more_shapes_than_are_kept(target: Target, generator: torch.Generator, look: bool) -> None:
    for rows in [*range(1, 8), *range(7, 0, -1)]:
        check(leaves_of(generator, target, rows))
    assert sum(map(len, OP.seen.values())) == (_short_cut._KEPT if look else 0)


def test_other_kinds_of_arguments(target: Target, generator: torch.Generator) -> None:
    x, _, bias = leaves_of(generator, target)
    for scale, low, high in ((1.5, None, 1.0), (2, -1, None), (True, -math.inf, 1.0), (1.5, -1.0, 1.0)) * 2:
        assert_agree(fused_scale_bias_clamp(x, scale, bias, low, high).detach(), torch.clamp(x * scale + bias, low, high).detach())


def test_one_tensor_twice(target: Target, generator: torch.Generator) -> None:
    x = draw(generator, (8, 8), torch.float32, target.device)
    for _ in range(3):
        assert_agree(fused_scale_bias_clamp(x, x, x, *BOUNDS), composed(x, x, x))
    assert not any(OP.seen.values())


def test_unaligned_and_strided_after_plain(target: Target, generator: torch.Generator) -> None:
    _, scale, bias = leaves_of(generator, target)
    for x in (
        draw(generator, (6, 8), torch.float32, target.device),
        draw(generator, (49,), torch.float32, target.device)[1:].view(6, 8),
        draw(generator, (8, 6), torch.float32, target.device).t(),
        torch._neg_view(draw(generator, (6, 8), torch.float32, target.device)),
        torch.nn.Parameter(draw(generator, (6, 8), torch.float32, target.device)),
    ):
        for _ in range(2):
            assert_agree(fused_scale_bias_clamp(x, scale, bias, *BOUNDS).detach(), composed(x, scale, bias).detach())


def test_gradients_that_lie_otherwise_and_hooks_after_plain_ones(target: Target, generator: torch.Generator) -> None:
    leaves = leaves_of(generator, target)
    check(leaves)
    check(leaves)
    for grad_out in (
        torch.ones((), device=target.device).expand(6, 8),
        draw(generator, (8, 6), torch.float32, target.device).t(),
        draw(generator, (49,), torch.float32, target.device)[1:].view(6, 8),
        torch._efficientzerotensor((6, 8), device=target.device),
    ):
        expected = torch.autograd.grad(composed(*leaves), leaves, grad_out + 0)
        for one, right in zip(
            torch.autograd.grad(fused_scale_bias_clamp(*leaves, *BOUNDS), leaves, grad_out), expected, strict=True
        ):
            assert_agree(one, right)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: torch.stack([one, one], -1)[..., 0]):
        check(leaves)
    first = torch.autograd.grad(fused_scale_bias_clamp(*leaves, *BOUNDS).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(composed(*leaves).square().sum(), leaves, create_graph=True)
    for one, right in zip(
        torch.autograd.grad(sum(g.sum() for g in first), leaves), torch.autograd.grad(sum(g.sum() for g in second), leaves)
    ):
        assert_agree(one, right)


def test_modes_see_a_call_that_was_seen(target: Target, generator: torch.Generator) -> None:
    """One that asks code compiled by Dynamo to overlook it, too."""
    x, scale, bias = (one.detach() for one in leaves_of(generator, target))
    called: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    class Overlooked(Watching):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

    for mode in (Watching, Overlooked):
        fused_scale_bias_clamp(x, scale, bias, *BOUNDS)
        called.clear()
        with mode():
            fused_scale_bias_clamp(x, scale, bias, *BOUNDS)
        assert any("fused_scale_bias_clamp" in str(one) for one in called)


def test_storage_that_was_freed(target: Target, generator: torch.Generator) -> None:
    """As sharding does with gathered parameters: no kernel may read there."""
    if target.impl == "reference":
        pytest.skip("PyTorch's own operations read it")
    x, scale, bias = (one.detach() for one in leaves_of(generator, target))
    for _ in range(2):
        fused_scale_bias_clamp(x, scale, bias, *BOUNDS)
    bias.untyped_storage().resize_(0)
    with pytest.raises(OperandError, match="storage was freed"):
        fused_scale_bias_clamp(x, scale, bias, *BOUNDS)


@pytest.mark.gpu
def test_libraries_do_not_take_each_others_calls(generator: torch.Generator) -> None:
    """Arrays of one shape and dtype from each library, in turns."""
    cupy = pytest.importorskip("cupy")
    x = draw(generator, (6, 8), torch.float32, "cuda")
    right = torch.clamp(x * 1.5 + 0.25, *BOUNDS)
    for _ in range(3):
        for one in (x, cupy.asarray(x), x.cpu().numpy(), x.cpu()):
            y = cupyfused.fused_scale_bias_clamp(one, 1.5, 0.25, *BOUNDS)
            assert type(y) is type(one)
            assert_agree(torch.as_tensor(y, device="cuda"), right)
