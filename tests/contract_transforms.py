"""The transforming part of the contract: functorch, forward mode, batched gradients, lazily negated views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import Function, OpUnderTest, assert_agree, draw_arguments
from contract_calls import LAST_DIM, PER_CHANNEL, total
from targets import Target
from torch import Tensor

__all__ = ["Transforms"]

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
    "batched gradients": lambda f, values: torch.autograd.functional.jacobian(f, (values[0][0, 0, 0], *values[1:]), vectorize=True),
}


class Transforms:
    """Every check of a call that PyTorch transforms: it equals what the composed expression gives."""

    op: OpUnderTest

    @pytest.mark.parametrize("transform", TRANSFORMS)
    def test_transforms(self, target: Target, generator: torch.Generator, transform: str) -> None:
        for options in self.op.options:
            values = draw_arguments(
                self.op, generator, ((2, 3, 5, 7), (3, 1, 7), (3, 1, 7)), [torch.float64], target.device, smooth=True
            )
            found, expected = (leaves_of(TRANSFORMS[transform](function, values)) for function in self.op.both(target, options))
            for one, right in zip(found, expected, strict=True):
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
