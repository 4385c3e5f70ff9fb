"""The calling part of the contract: `out=`, grad modes, what is saved, autograd's corners."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from checks import Function, OpUnderTest, assert_agree, assert_same, draw_arguments
from layouts import LAYOUTS, Shapes, draw, lay
from targets import Target
from torch import Tensor

import cupyfused

__all__ = ["LAST_DIM", "PER_CHANNEL", "Calls", "total"]

PER_CHANNEL: Shapes = ((2, 3, 5, 7), (3, 1, 1), (3, 1, 1))
LAST_DIM: Shapes = ((5, 16), (16,), (5, 1))


def total(function: Function) -> Function:
    """Return a scalar loss that weighs every element differently."""

    def loss(*values: Any) -> Tensor:
        y = function(*values)
        return (y * torch.arange(1, y.numel() + 1, dtype=y.dtype, device=y.device).view(y.shape)).sum()

    return loss


class Calls:
    """Every check of how an op may be called."""

    op: OpUnderTest

    # ---- out=

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_out(self, target: Target, generator: torch.Generator, layout: str, dtype: torch.dtype) -> None:
        """Written through whatever strides it has, and nothing beside it; refused where two elements share a place."""
        arguments = draw_arguments(self.op, generator, ((2, 8, 2, 16), (8, 1, 1), (16,)), [dtype], target.device)
        call = self.op.fused(target, self.op.options[0])
        out = lay(draw(generator, (2, 8, 2, 16), dtype, target.device), layout)
        if "expanded" in layout or layout == "overlapping":
            with pytest.raises(ValueError, match="out"):
                call_out(target, self.op, arguments, out)
            return
        gaps, version = gaps_of(out), out._version
        assert call_out(target, self.op, arguments, out) is out
        assert_same(out.contiguous(), call(*arguments).contiguous())
        assert out._version > version
        assert_same(gaps_of(out), gaps)

    @pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "unaligned"])
    def test_out_is_x(self, target: Target, generator: torch.Generator, layout: str) -> None:
        arguments = draw_arguments(self.op, generator, LAST_DIM, [torch.float32], target.device, [layout])
        expected = self.op.fused(target, self.op.options[0])(*arguments)
        call_out(target, self.op, arguments, arguments[0])
        assert_same(arguments[0].contiguous(), expected.contiguous())

    def test_out_beside_gradients(self, target: Target, generator: torch.Generator) -> None:
        """Refused while recording, as in PyTorch; taken without, and in inference mode."""
        arguments = draw_arguments(self.op, generator, LAST_DIM, [torch.float32], target.device)
        expected = self.op.fused(target, self.op.options[0])(*arguments)
        leaf = [arguments[0].clone().requires_grad_(), *arguments[1:]]
        with pytest.raises(ValueError, match=r"out.*no gradient"):
            call_out(target, self.op, leaf, torch.empty_like(expected))
        with torch.no_grad():
            assert_same(call_out(target, self.op, leaf, torch.empty_like(expected)), expected)
        with torch.inference_mode():
            assert_same(call_out(target, self.op, leaf, torch.empty_like(expected)), expected)

    def test_out_written_over_a_saved_tensor_is_noticed(self, target: Target, generator: torch.Generator) -> None:
        leaves = [value.requires_grad_() for value in draw_arguments(self.op, generator, LAST_DIM, [torch.float32], target.device)]
        middle = leaves[0] * 1.5
        y = self.op.fused(target, self.op.options[0])(middle, *leaves[1:])
        with torch.no_grad():
            call_out(target, self.op, [value.detach() for value in leaves], middle)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    # ---- autograd

    def test_grad_modes(self, target: Target, generator: torch.Generator) -> None:
        arguments = draw_arguments(self.op, generator, LAST_DIM, [torch.float32], target.device)
        call = self.op.fused(target, self.op.options[0])
        expected = call(*arguments)
        leaves = [value.clone().requires_grad_() for value in arguments]
        assert not expected.requires_grad
        assert call(*leaves).requires_grad
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = call(*leaves)
            assert not y.requires_grad
            assert_same(y.clone(), expected)
        with torch.inference_mode():
            assert_same(call(*[value.clone() for value in arguments]), expected)

    def test_function_apply(self, target: Target, generator: torch.Generator) -> None:
        """The `autograd.Function` itself: one gradient an input, None for each option."""
        function = getattr(cupyfused, self.op.function)
        assert issubclass(function, torch.autograd.Function)
        leaves = [
            value.requires_grad_()
            for value in draw_arguments(self.op, generator, PER_CHANNEL, [torch.float64], target.device, smooth=True)
        ]
        y = function.apply(*leaves, *self.op.options[0])
        composed = self.op.composed(*leaves, *self.op.options[0])
        assert_agree(y, composed)
        grad_out = draw(generator, y.shape, y.dtype, target.device)
        returned = y.grad_fn.apply(grad_out)
        assert len(returned) == len(leaves) + len(self.op.options[0])
        assert all(one is None for one in returned[len(leaves) :])
        for gradient, right in zip(returned, torch.autograd.grad(composed, leaves, grad_out)):
            assert_agree(gradient, right)

    def test_a_tensor_passed_in_several_places(self, target: Target, generator: torch.Generator) -> None:
        x = draw(generator, (5, 7), torch.float64, target.device).requires_grad_()
        for places in ([x] * 3, [x, x[0], x[:, :1]]):
            arguments = places[: len(self.op.inputs)]
            y, composed = (function(*arguments) for function in self.op.both(target, self.op.options[0]))
            assert_agree(*(torch.autograd.grad(one.square().sum(), x)[0] for one in (y, composed)))

    def test_non_leaves_and_backward_twice(self, target: Target, generator: torch.Generator) -> None:
        leaves = [
            value.requires_grad_()
            for value in draw_arguments(self.op, generator, PER_CHANNEL, [torch.float64], target.device, smooth=True)
        ]
        losses = [total(function)(*[leaf * 1.0 for leaf in leaves]) for function in self.op.both(target, self.op.options[0])]
        expected = torch.autograd.grad(losses[1], leaves)
        for _ in range(2):
            losses[0].backward(retain_graph=True)
        for leaf, right in zip(leaves, expected):
            assert leaf.grad is not None
            assert_agree(leaf.grad, 2 * right)

    def test_changing_a_saved_input_is_noticed(self, target: Target, generator: torch.Generator) -> None:
        leaves = [value.requires_grad_() for value in draw_arguments(self.op, generator, LAST_DIM, [torch.float32], target.device)]
        middle = leaves[0] * 1.5
        y = self.op.fused(target, self.op.options[0])(middle, *leaves[1:])
        middle.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    @pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3))[1:], ids=str)
    def test_what_is_saved(self, target: Target, generator: torch.Generator, wanted: tuple[bool, ...]) -> None:
        """Only inputs that a wanted gradient reads, and nothing else of any size."""
        if not target.runs_kernels:
            pytest.skip("the composed expression saves what PyTorch decides")
        for options in ((None,) * len(self.op.options[0]), *self.op.options):
            arguments = draw_arguments(self.op, generator, PER_CHANNEL, [torch.float32], target.device)
            leaves = [value.requires_grad_(asked) for value, asked in zip(arguments, wanted)]
            saved: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda one, keep=saved: keep.append(one) or one, lambda one: one):  # type: ignore[misc]
                self.op.fused(target, options)(*leaves)
            reads = [self.op.reads[name] for name, asked in zip(self.op.inputs, wanted) if asked]
            names = frozenset().union(*reads, self.op.reads_with_options if any(one is not None for one in options) else ())
            kept = {name for name, leaf in zip(self.op.inputs, leaves) if any(leaf.data_ptr() == one.data_ptr() for one in saved)}
            assert (kept, len(saved)) == (names, len(names))

    def test_parameters_of_a_module(self, target: Target, generator: torch.Generator) -> None:
        """Two steps of SGD end where the composed expression ends; a frozen parameter stays, and gets no gradient."""
        ends = []
        drawn = draw_arguments(self.op, generator, PER_CHANNEL, [torch.float64], target.device, smooth=True)
        for function in self.op.both(target, self.op.options[0]):
            parameters = [torch.nn.Parameter(value.clone(), requires_grad=k != 1) for k, value in enumerate(drawn)]
            optimiser = torch.optim.SGD(parameters[:1] + parameters[2:], lr=1e-7)
            for _ in range(2):
                optimiser.zero_grad()
                total(function)(*parameters).backward()
                optimiser.step()
            assert len(parameters) < 2 or parameters[1].grad is None
            ends.append(parameters)
        for one, right in zip(*ends):
            assert_agree(one, right)


def call_out(target: Target, op: OpUnderTest, arguments: list[Tensor], out: Tensor) -> Tensor:
    return target.run(op.call, *arguments, *op.options[0], out=out)  # type: ignore[no-any-return]


def gaps_of(view: Tensor) -> Tensor:
    """Return what lies in a view's memory beside its own elements, which are taken as 0."""
    whole = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage()).clone()
    whole.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(0)
    return whole
