"""The transforming part of the contract: functorch, forward mode, batched gradients, lazily negated views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import Function, OpUnderTest, assert_agree, draw_arguments
from contract_calls import LAST_DIM, PER_CHANNEL, total
from targets import REFERENCE, Target
from torch import Tensor

__all__ = ["Transforms"]


def row(values: list[Tensor]) -> tuple[Tensor, ...]:
    return values[0][0, 0, 0], values[1][0, 0], values[2][0, 0]


def squared(function: Function) -> Function:
    return lambda *values: function(*values).square().sum()


def backward_of_a_gradient(function: Function, values: list[Tensor]) -> Any:
    """Plain autograd around a gradient of functorch."""
    leaf = values[0].detach().requires_grad_()
    return torch.autograd.grad(torch.func.grad(squared(function))(leaf, *values[1:]).square().sum(), leaf)


# For each transform, what it makes of an op with its options bound.
TRANSFORMS: dict[str, Callable[[Function, list[Tensor]], Any]] = {
    "vmap over x": lambda f, values: torch.func.vmap(f, in_dims=(0, None, None))(*values),
    "vmap over everything": lambda f, values: torch.func.vmap(f)(*[torch.stack([one, one * 1.25]) for one in values]),
    "vmap inner dim": lambda f, values: torch.func.vmap(f, in_dims=(1, 0, 0), out_dims=1)(*values),
    "grad": lambda f, values: torch.func.grad(total(f), argnums=(0, 1, 2))(*values),
    "per-sample gradients": lambda f, values: torch.func.vmap(
        torch.func.grad(total(f), argnums=(0, 1, 2)), in_dims=(0, None, None)
    )(*values),
    "vjp": lambda f, values: torch.func.vjp(f, *values)[1](f(*values).cos()),
    "jvp": lambda f, values: torch.func.jvp(f, tuple(values), tuple(one.cos() for one in values)),
    "jacrev": lambda f, values: torch.func.jacrev(f, argnums=1)(*values),
    "jacfwd": lambda f, values: torch.func.jacfwd(f, argnums=1)(*values),
    "hessian": lambda f, values: torch.func.hessian(total(f), argnums=(0, 1))(values[0][:, 0, 0], values[1][0, 0], values[2][0, 0]),
    "vmap twice": lambda f, values: torch.func.vmap(torch.func.vmap(f, in_dims=(0, None, None)), in_dims=(None, 0, 0))(*values),
    "vmap over a parameter": lambda f, values: torch.func.vmap(f, in_dims=(None, 0, None))(values[0], values[1], values[2][0]),
    "gradient of vmap": lambda f, values: torch.func.grad(total(torch.func.vmap(f, in_dims=(0, None, None))), argnums=(0, 1, 2))(
        *values
    ),
    "gradient of a gradient": lambda f, values: torch.func.grad(
        lambda scale: torch.func.grad(total(f))(values[0], scale, values[2]).square().sum()
    )(values[1]),
    "third derivative": lambda f, values: torch.func.grad(
        lambda x: (
            torch.func.grad(lambda scale: torch.func.grad(squared(f), argnums=2)(x, scale, values[2]).square().sum())(values[1])
            .square()
            .sum()
        )
    )(values[0]),
    "backward of a gradient": backward_of_a_gradient,
    "jvp of jvp": lambda f, values: torch.func.jvp(
        lambda x: torch.func.jvp(lambda scale: f(x, scale, values[2]), (values[1],), (values[1].cos(),))[1],
        (values[0],),
        (values[0].cos(),),
    ),
    "jacfwd of jacfwd": lambda f, values: torch.func.jacfwd(torch.func.jacfwd(f, argnums=1), argnums=0)(*row(values)),
    "jacrev of jacfwd": lambda f, values: torch.func.jacrev(torch.func.jacfwd(f, argnums=1), argnums=0)(*row(values)),
    "jacrev of jacrev": lambda f, values: torch.func.jacrev(torch.func.jacrev(f, argnums=1), argnums=0)(*row(values)),
    "linearize": lambda f, values: torch.func.linearize(lambda x: f(x, *values[1:]), values[0])[1](values[0].cos()),
    "functionalize": lambda f, values: torch.func.functionalize(f)(*values),
    "batched gradients": lambda f, values: torch.autograd.functional.jacobian(f, (values[0][0, 0, 0], *values[1:]), vectorize=True),
}


# PyTorch's constant folding says so of its own graph.
LINEARIZE_WARNS = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")


class Transforms:
    """Every check of a call that PyTorch transforms: it equals what the composed expression gives."""

    op: OpUnderTest

    @LINEARIZE_WARNS
    @pytest.mark.parametrize("transform", TRANSFORMS)
    def test_transforms(self, target: Target, generator: torch.Generator, transform: str) -> None:
        for options in self.op.options:
            values = draw_arguments(
                self.op, generator, ((2, 3, 5, 7), (3, 1, 7), (3, 1, 7)), [torch.float64], target.device, smooth=True
            )
            found, expected = (leaves_of(TRANSFORMS[transform](function, values)) for function in self.op.both(target, options))
            for one, right in zip(found, expected, strict=True):
                assert_agree(one, right)

    @LINEARIZE_WARNS
    @pytest.mark.parametrize("transform", TRANSFORMS)
    def test_transforms_of_the_registered_operator(self, target: Target, generator: torch.Generator, transform: str) -> None:
        """A direct call of torch.ops takes tensors; it is right, or loud, never a zero tangent."""
        if target is REFERENCE:
            pytest.skip("the registered operator takes the same route on the CPU with the kernels, which is tested")
        values = draw_arguments(
            self.op, generator, ((2, 3, 5, 7), (3, 1, 7), (3, 1, 7)), [torch.float64], target.device, smooth=True
        )
        options = [torch.tensor(option, dtype=torch.float64, device=target.device) for option in self.op.options[0]]
        functions = (lambda *inputs: self.op.registered(*inputs, *options), self.op.plain(tuple(options)))
        found, expected = (leaves_of(TRANSFORMS[transform](function, values)) for function in functions)
        for one, right in zip(found, expected, strict=True):
            assert_agree(one, right)

    def test_vmap_over_options(self, target: Target, generator: torch.Generator) -> None:
        """Each sample has bounds of its own: no 0-dim ones are left, and it is right all the same."""
        values = draw_arguments(self.op, generator, PER_CHANNEL, [torch.float64], target.device, smooth=True)
        given = [torch.tensor(option, dtype=torch.float64, device=target.device) for option in self.op.options[0]]
        options = [torch.stack([option, option * 1.25, option * 0.75]) for option in given]
        dims = (None,) * len(values) + (0,) * len(options)
        if not options:
            pytest.skip("an op without options")
        results = []
        for function in (lambda *all: target.run(self.op.call, *all), self.op.composed):
            places = tuple(range(len(values)))
            gradient = torch.func.grad(squared(function), argnums=places)
            results.append(
                [
                    torch.func.vmap(function, in_dims=dims)(*values, *options),
                    *torch.func.vmap(gradient, in_dims=dims)(*values, *options),
                ]
            )
        for one, right in zip(*results, strict=True):
            assert_agree(one, right)

    def test_forward_mode_duals(self, target: Target, generator: torch.Generator) -> None:
        primals = draw_arguments(self.op, generator, PER_CHANNEL, [torch.float64], target.device, smooth=True)
        tangents = [value.cos() for value in primals]
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip(primals, tangents)]
            y, composed = (
                torch.autograd.forward_ad.unpack_dual(function(*duals)) for function in self.op.both(target, self.op.options[0])
            )
        assert_agree(y.primal, composed.primal)
        assert y.tangent is not None
        assert_agree(y.tangent, composed.tangent)

    def test_lazily_negated_inputs(self, target: Target, generator: torch.Generator) -> None:
        """A view that is to be read with the other sign, as `torch.imag` of a conjugate gives."""
        for k in range(len(self.op.inputs)):
            arguments = draw_arguments(self.op, generator, LAST_DIM, [torch.float64], target.device, smooth=True)
            arguments[k] = torch.complex(torch.zeros_like(arguments[k]), arguments[k]).conj().imag.requires_grad_()
            assert arguments[k].is_neg()
            y, composed = (function(*arguments) for function in self.op.both(target, self.op.options[0]))
            assert_agree(y, composed)
            assert_agree(*(torch.autograd.grad(one.square().sum(), arguments[k])[0] for one in (y, composed)))


def leaves_of(found: Any) -> Iterator[Tensor]:
    """Walk the tensors of nested tuples."""
    if isinstance(found, Tensor):
        yield found
    else:
        for one in found:
            yield from leaves_of(one)
