"""fused_scale_bias_clamp: the contract, and what its bounds add."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from contract import Contract, OpUnderTest, assert_agree, assert_same, check_forward, check_gradients, draw_arguments
from targets import Target
from torch import Tensor

from cupyfused import FusedScaleBiasClamp, fused_scale_bias, fused_scale_bias_clamp


def composed(x: Any, scale: Any, bias: Any, min_val: Any = None, max_val: Any = None) -> Tensor:
    v = x * scale + bias
    return v if min_val is None and max_val is None else torch.clamp(v, min_val, max_val)


def distance_to_bound(x: Any, scale: Any, bias: Any, min_val: Any, max_val: Any) -> Tensor:
    v = x * scale + bias
    return torch.stack([(v - bound).abs() for bound in (min_val, max_val) if bound is not None]).amin(0)


OP = OpUnderTest(
    call=fused_scale_bias_clamp,
    function="FusedScaleBiasClamp",
    composed=composed,
    inputs=("x", "scale", "bias"),
    reads={"x": frozenset({"scale"}), "scale": frozenset({"x"}), "bias": frozenset()},
    reads_with_options=frozenset({"x", "scale", "bias"}),
    options=((-0.75, 0.875), (None, 0.375), (-0.25, None)),
    integer_options=((20, 90), (None, 50), (30, None)),
    distance_to_kink=distance_to_bound,
    takes_bool=False,
)
LAST_DIM = ((5, 16), (16,), (5, 1))


class TestContract(Contract):
    op = OP


# ---- bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
def test_without_bounds_it_is_fused_scale_bias(target: Target, generator: torch.Generator, dtype: torch.dtype) -> None:
    arguments = draw_arguments(OP, generator, LAST_DIM, [dtype], target.device)
    expected = target.run(fused_scale_bias, *arguments)
    for bounds in ((), (None,), (None, None)):
        y = target.run(fused_scale_bias_clamp, *arguments, *bounds)
        assert_same(y, expected)
        assert y.stride() == expected.stride()


def test_max_wins_where_min_is_larger(target: Target, generator: torch.Generator) -> None:
    arguments = draw_arguments(OP, generator, LAST_DIM, [torch.float32], target.device)
    arguments[0][0, 0] = math.nan
    y = check_forward(OP, target, arguments, (2.0, -2.0))
    assert y[0, 0].isnan()
    assert bool((y.flatten()[1:] == -2.0).all())
    check_gradients(OP, target, arguments, (2.0, -2.0), torch.ones_like(y))


@pytest.mark.parametrize(
    "bounds", [(math.nan, 1.0), (-1.0, math.nan), (math.nan, None), (None, math.nan), (math.nan, math.nan)], ids=str
)
def test_nan_bounds(target: Target, generator: torch.Generator, bounds: tuple[Any, ...]) -> None:
    """Make everything NaN, which one bound alone does not do in PyTorch's CUDA kernel (2.11) but does in its CPU kernel.

    The gradient is whatever PyTorch makes of that.
    """
    arguments = draw_arguments(OP, generator, LAST_DIM, [torch.float32], target.device)
    assert target.run(fused_scale_bias_clamp, *arguments, *bounds).isnan().all()
    compare_gradients(target, arguments, bounds, exact=False)
    as_tensors = tuple(bound if bound is None else torch.tensor(bound, device=target.device) for bound in bounds)
    compare_gradients(target, arguments, as_tensors, exact=False)


@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (-math.inf, 0.5), (math.inf, None), (None, -math.inf)], ids=str)
def test_infinite_bounds(target: Target, generator: torch.Generator, bounds: tuple[Any, ...]) -> None:
    arguments = draw_arguments(OP, generator, LAST_DIM, [torch.float32], target.device)
    arguments[0][0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    y = target.run(fused_scale_bias_clamp, *arguments, *bounds)
    assert_agree(y, composed(*arguments, *bounds))
    arguments = draw_arguments(OP, generator, LAST_DIM, [torch.float32], target.device)
    compare_gradients(target, arguments, bounds, exact=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bounds_as_zero_dim_tensors(target: Target, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Of any dtype, which does not promote; on the CPU or beside x; both, one, or one beside a number."""
    arguments = draw_arguments(OP, generator, LAST_DIM, [dtype], target.device)
    expected = target.run(fused_scale_bias_clamp, *arguments, -0.75, 0.875)
    for kind in (dtype, torch.float32, torch.float64):
        for device in {"cpu", target.device}:
            low, high = torch.tensor(-0.75, dtype=kind, device=device), torch.tensor(0.875, dtype=kind, device=device)
            for bounds in ((low, high), (low, 0.875), (-0.75, high)):
                assert_same(target.run(fused_scale_bias_clamp, *arguments, *bounds), expected)
    for bounds in ((low, None), (None, high)):
        numbers = tuple(bound if bound is None else bound.item() for bound in bounds)
        assert_same(
            target.run(fused_scale_bias_clamp, *arguments, *bounds), target.run(fused_scale_bias_clamp, *arguments, *numbers)
        )


@pytest.mark.parametrize("bounds", [(0, 255), (0.0, 200.5), (None, 20), (-1.5, None)], ids=str)
def test_float_bounds_promote_integers(target: Target, generator: torch.Generator, bounds: tuple[Any, ...]) -> None:
    for dtype in (torch.int16, torch.int64):
        arguments = draw_arguments(OP, generator, LAST_DIM, [dtype], target.device)
        y = target.run(fused_scale_bias_clamp, *arguments, *bounds)
        assert_same(y, composed(*arguments, *bounds))


def test_strides_of_dims_of_extent_one(target: Target, generator: torch.Generator) -> None:
    """The clamp of the composed expression is a step of its own, and each step chooses strides anew."""
    arguments = draw_arguments(OP, generator, ((3, 1, 1), (1, 1), ()), [torch.float32], target.device)
    for x in (arguments[0].permute(2, 1, 0), arguments[0].permute(1, 0, 2), arguments[0].permute(1, 2, 0)):
        check_forward(OP, target, [x, *arguments[1:]], (-0.75, 0.875))


# ---- exactly at a bound -----------------------------------------------------------------------------------------------------


def compare_gradients(target: Target, arguments: list[Tensor], bounds: tuple[Any, ...], exact: bool = True) -> None:
    """Compare with what the installed PyTorch gives the composed expression in float32 or float64."""
    compute = torch.float64 if arguments[0].dtype is torch.float64 else torch.float32
    leaves = [value.detach().clone().requires_grad_() for value in arguments]
    wide = [value.detach().to(compute).requires_grad_() for value in arguments]
    y = target.run(fused_scale_bias_clamp, *leaves, *bounds)
    grad_out = (torch.arange(y.numel(), device=y.device).view(y.shape) % 3 + 1).to(y.dtype)
    found = torch.autograd.grad(y, leaves, grad_out)
    expected = torch.autograd.grad(composed(*wide, *bounds), wide, grad_out.to(compute))
    for gradient, right in zip(found, expected):
        if exact:
            assert_same(gradient, right.to(gradient.dtype))
        else:
            assert_agree(gradient, right.to(gradient.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("as_tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("bounds", [(0, 255), (0, None), (None, 255), (128, 128), (255, 0), (200, 100)], ids=str)
def test_gradient_exactly_at_a_bound_is_that_of_torch(
    target: Target, dtype: torch.dtype, as_tensors: bool, bounds: tuple[Any, ...]
) -> None:
    """Pixels touch 0 and 255 all the time; small whole numbers, so that every sum is exact in every order."""
    pixels = torch.tensor([0, 255, 128, 1, 254, 100, 200, -1, 256, 0, 255, 127], dtype=torch.float64)
    x = pixels.repeat(2, 1).to(target.device, dtype)
    scale, bias = (torch.tensor(values, device=target.device, dtype=dtype).view(2, 1) for values in ([1, -1], [0, 255]))
    given = bounds
    if as_tensors:
        given = tuple(bound if bound is None else torch.tensor(float(bound), device=target.device, dtype=dtype) for bound in bounds)
    compare_gradients(target, [x, scale, bias], given)
    compare_gradients(target, [x[:, :8], scale.expand(2, 8), bias.expand(2, 8)], given)


def test_a_bound_that_asks_for_a_gradient_is_refused_each_time(target: Target, generator: torch.Generator) -> None:
    """Also where the call has been decided, and by the Function; it is taken where nothing is recorded."""
    x = draw_arguments(OP, generator, ((5, 7), (7,), (7,)), [torch.float64], target.device)[0].requires_grad_()
    bound = torch.zeros((), dtype=torch.float64, device=target.device)
    calls = [lambda bound: target.run(fused_scale_bias_clamp, x, 2.0, 0.5, bound, None)]
    calls += [lambda bound: FusedScaleBiasClamp.apply(x, 2.0, 0.5, bound, None)]
    for call in calls:
        call(bound).sum().backward()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"min_val.*without gradient"):
                call(bound.clone().requires_grad_())
    with torch.no_grad():
        assert_same(calls[0](bound.clone().requires_grad_()), calls[0](bound))
