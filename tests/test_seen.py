"""Calls that are just like one before: what one look tells, and what it must not take for the same."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checks import assert_agree
from layouts import draw
from targets import Target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cupyfused
from cupyfused import OperandError, _backward, _short_cut, fused_scale_bias_clamp
from cupyfused._arrays import Operand
from cupyfused._dtypes import BY_NAME, Rank, Typed
from cupyfused._layout import Strided
from cupyfused._plan import Described
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


@pytest.mark.parametrize("impl", ["reference", "host"])
def test_arrays_without_dims_are_numbers_each_time(impl: str) -> None:
    """NumPy's count as numbers, so promotion and range are those of numbers, the second time too."""
    x = np.linspace(-3.0, 3.0, 7, dtype=np.float32)
    calls = [fused_scale_bias_clamp(x, np.array(1.1), np.array(0.3), *BOUNDS, impl=impl) for _ in range(3)]
    expected = fused_scale_bias_clamp(x, 1.1, 0.3, *BOUNDS, impl=impl)
    for y in calls:
        assert y.dtype == np.float32 and np.array_equal(y, expected)
    for _ in range(2):
        with pytest.raises(OperandError, match="a number that int32 holds"):
            fused_scale_bias_clamp(np.arange(5, dtype=np.int32), 1, 0, np.array(2**32 + 3), None, impl=impl)


def test_arrays_of_another_class_after_plain_ones() -> None:
    x = np.arange(4.0, dtype=np.float32).reshape(2, 2)
    for one in (x, x.view(np.matrix), x, x.view(np.matrix)):
        y = fused_scale_bias_clamp(one, one, 0.0, *BOUNDS)
        assert np.array_equal(y, np.clip(x * x, *BOUNDS))


def test_whole_numbers_beyond_the_dtype(target: Target) -> None:
    """Infinite in forward and in backward."""
    x = torch.ones(5, device=target.device, requires_grad=True)
    for scale, low, expected in ((10**39, None, math.inf), (2.0, -(10**39), 2.0)):
        (gradient,) = torch.autograd.grad(fused_scale_bias_clamp(x, scale, 0.0, low, None).sum(), x)
        assert torch.equal(gradient, torch.full_like(x, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1,), (1, 1), (5,)], ids=str)
@pytest.mark.parametrize(("dtype", "parameter"), [(torch.float32, torch.float64), (torch.float16, torch.float32)], ids=str)
def test_gradient_of_a_parameter_on_the_cpu(shape: tuple[int, ...], dtype: torch.dtype, parameter: torch.dtype) -> None:
    """Without dims, beside a CUDA tensor: by value, and its gradient in its own dtype, of one element too."""
    x = torch.full(shape, 3.0, device="cuda", dtype=dtype)
    scale, bias = (torch.tensor(value, dtype=parameter, requires_grad=True) for value in (2.0, 0.5))
    y = fused_scale_bias_clamp(x, scale, bias, -100.0, 100.0)
    for gradient, each in zip(torch.autograd.grad(y.sum(), (scale, bias)), (3.0, 1.0)):
        assert gradient.dtype == parameter and gradient.item() == each * x.numel()


def test_an_instance_stores_the_gradients_of_one_element() -> None:
    """What the test above asks of a plan, where there is no GPU: 0-dim tensors of the CPU go by value beside CUDA tensors only."""
    f32, f64, one = BY_NAME["float32"], BY_NAME["float64"], Strided((), ())
    x = Operand(None, Described(f32, Strided((1,), (1,))), Typed(f32, Rank.ARRAY), (2, 0))
    number = Operand(None, Described(f64), Typed(f64, Rank.ZERO_DIM), None)
    for shape, parameter in (((1,), "any_dtype"), ((5,), "float32")):
        call = SimpleNamespace(shape=shape, dtype=f32)
        stored = _backward._storage(call, [x, number], [None, Described(f64, one)])  # type: ignore[arg-type]
        assert stored.parameter == parameter


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
