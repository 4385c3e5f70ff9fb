"""The backward part of the contract: gradients, and gradients of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import FLOATS, OpUnderTest, assert_agree, assert_same, check_forward, check_gradients, draw_arguments, draw_gradient
from contract_values import LAID_OUT, MIXED, SPECIAL, random_shapes
from layouts import EMPTY, LAYOUTS, SHAPES, SUMS, WIDTHS, Shapes, draw, lay, shape_id
from targets import Target
from torch import Tensor

__all__ = ["Gradients"]


def gpu(*values: Any) -> Any:
    """Mark a case that takes seconds where a GPU takes none: a block of threads costs 3 ms on a CPU."""
    return pytest.param(*values, marks=pytest.mark.gpu)


PER_CHANNEL: Shapes = ((2, 3, 5, 7), (3, 1, 1), (3, 1, 1))
# What a loss may hand back: values of stride 0, gaps, other orders of dims.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(),
    "mean": lambda y: y.mean(),
    "first column": lambda y: y[..., 0].sum(),
    "every other row": lambda y: y[:, ::2].square().sum(),
    "heads": lambda y: (y.transpose(1, 3) ** 2).flatten(1).cumsum(1)[:, -1].sum(),
    "last dim mean": lambda y: y.mean(-1).square().sum(),
    "flip": lambda y: (y.flip(-1) * y.detach()).sum(),
}


class Gradients:
    """Every check of gradients."""

    op: OpUnderTest

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("shapes", SHAPES + EMPTY, ids=shape_id)
    def test_gradients_of_broadcast_shapes(
        self, target: Target, generator: torch.Generator, shapes: Shapes, dtype: torch.dtype
    ) -> None:
        arguments = draw_arguments(self.op, generator, shapes, [dtype], target.device)
        for options in self.op.options if dtype is torch.float32 else self.op.options[:1]:
            check_gradients(self.op, target, arguments, options, draw_gradient(self.op, generator, arguments, options))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, gpu(torch.float64)], ids=str)
    @pytest.mark.parametrize("shapes", SUMS, ids=shape_id)
    def test_gradients_summed_over_many(
        self, target: Target, generator: torch.Generator, shapes: Shapes, dtype: torch.dtype
    ) -> None:
        arguments = draw_arguments(self.op, generator, shapes, [dtype], target.device)
        options = self.op.options[0]
        check_gradients(self.op, target, arguments, options, draw_gradient(self.op, generator, arguments, options))

    @pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3))[1:-1], ids=str)
    def test_only_the_gradients_asked_for(self, target: Target, generator: torch.Generator, wanted: tuple[bool, ...]) -> None:
        """An input whose gradient is not asked for has none, and does not change the others."""
        for shapes in (PER_CHANNEL, ((3, 16), (16,), (3, 1)), ((3_001, 16), (16,), (16,))):
            arguments = draw_arguments(self.op, generator, shapes, [torch.float32], target.device)
            grad_out = draw_gradient(self.op, generator, arguments, self.op.options[0])
            found = check_gradients(self.op, target, arguments, self.op.options[0], grad_out, wanted)
            everything = check_gradients(self.op, target, arguments, self.op.options[0], grad_out)
            for asked, one, same in zip(wanted, found, everything):
                assert (one is not None) == asked
                if one is not None and same is not None:
                    assert_agree(one, same)

    @pytest.mark.parametrize(("shape", "dtype"), LAID_OUT, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gradients_of_layouts(
        self, target: Target, generator: torch.Generator, layout: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """The layout in x, in the inputs, and in the incoming gradient."""
        options = self.op.options[0]
        for layouts, of_gradient in (([layout, "contiguous"], "contiguous"), ([layout], layout), (["contiguous"], layout)):
            smooth = "expanded" in of_gradient or of_gradient == "overlapping"  # one place in memory stands for many elements
            small = (shape, shape[1:], shape[-1:])
            arguments = draw_arguments(self.op, generator, small, [dtype], target.device, layouts, smooth=smooth)
            check_gradients(self.op, target, arguments, options, draw_gradient(self.op, generator, arguments, options, of_gradient))

    def test_gradients_at_random(self, target: Target, generator: torch.Generator) -> None:
        for _ in range(25):
            whole, shapes = random_shapes(generator, len(self.op.inputs))
            layouts = [list(LAYOUTS)[k] for k in torch.randint(len(LAYOUTS), (len(self.op.inputs) + 1,), generator=generator)]
            print(whole, shapes, layouts)
            arguments = draw_arguments(self.op, generator, shapes, [torch.float32], target.device, layouts[1:], smooth=True)
            options = self.op.options[0]
            check_gradients(self.op, target, arguments, options, draw_gradient(self.op, generator, arguments, options, layouts[0]))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("width", [*WIDTHS[:-1], gpu(WIDTHS[-1])])
    def test_gradients_of_widths(self, target: Target, generator: torch.Generator, width: int, dtype: torch.dtype) -> None:
        arguments = draw_arguments(self.op, generator, ((3, width), (width,), (3, 1)), [dtype], target.device)
        options = self.op.options[0]
        check_gradients(self.op, target, arguments, options, draw_gradient(self.op, generator, arguments, options))

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("inner", [(1_023,), (49, 6), (6, 7, 5), (7, 3, 6), (4, 9), (17,)], ids=str)
    def test_parameters_that_repeat(
        self, target: Target, generator: torch.Generator, inner: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Rows of any width and number, each parameter along any of the inner dims; and an x that begins anywhere."""
        for _ in range(6):
            rows = int(torch.randint(2, 40, (), generator=generator))
            keeps = torch.randint(2, (2, len(inner)), generator=generator).tolist()
            parameters = [tuple(extent if kept else 1 for extent, kept in zip(inner, keep)) for keep in keeps]
            layout = ("contiguous", "unaligned")[int(torch.randint(3, (), generator=generator)) == 0]
            wanted = [True] * 3 if rows % 3 else torch.randint(2, (3,), generator=generator).bool().tolist()
            print(rows, parameters, layout, wanted)
            shapes = ((rows, *inner), *parameters)
            arguments = draw_arguments(self.op, generator, shapes, [dtype], target.device, [layout, "contiguous"])
            options = self.op.options[0]
            check_forward(self.op, target, arguments, options)
            if any(wanted):
                check_gradients(self.op, target, arguments, options, draw_gradient(self.op, generator, arguments, options), wanted)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("loss", LOSSES)
    def test_gradients_of_losses(self, target: Target, generator: torch.Generator, loss: str, dtype: torch.dtype) -> None:
        """What reaches a backward has strides that no user ever chose."""
        for shapes in (PER_CHANNEL, ((2, 4, 6, 16), (16,), (4, 1, 1))):
            arguments = draw_arguments(self.op, generator, shapes, [dtype], target.device, smooth=True)
            y = target.run(self.op.call, *arguments, *self.op.options[0]).requires_grad_()
            (grad_out,) = torch.autograd.grad(LOSSES[loss](y), y)
            check_gradients(self.op, target, arguments, self.op.options[0], grad_out)

    # ---- dtypes

    @pytest.mark.parametrize(("x_dtype", "dtype"), MIXED, ids=str)
    def test_gradients_of_mixed_floats(
        self, target: Target, generator: torch.Generator, x_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        """Each has the dtype of its own input."""
        options = self.op.options[0]
        for shape in ((3, 1, 1), (8,), ()):
            arguments = draw_arguments(self.op, generator, ((2, 3, 4, 8), shape, shape), [x_dtype, dtype], target.device)
            check_gradients(self.op, target, arguments, options, draw_gradient(self.op, generator, arguments, options))

    @pytest.mark.parametrize("x_dtype", [torch.uint8, torch.int64], ids=str)
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_gradients_beside_integer_x(
        self, target: Target, generator: torch.Generator, x_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        arguments = draw_arguments(self.op, generator, ((5, 16), (16,), (5, 1)), [x_dtype, dtype], target.device)
        options = self.op.options[0]
        check_gradients(self.op, target, arguments, options, draw_gradient(self.op, generator, arguments, options))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_gradients_at_nan_and_infinity(self, target: Target, dtype: torch.dtype) -> None:
        grid = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=dtype)] * len(self.op.inputs)).to(target.device)
        for options in self.op.options:
            leaves = [value.clone().requires_grad_() for value in grid.unbind(1)]
            found = torch.autograd.grad(target.run(self.op.call, *leaves, *options).sum(), leaves)
            for gradient, right in zip(found, torch.autograd.grad(self.op.composed(*leaves, *options).sum(), leaves)):
                assert_same(gradient, right)

    # ---- derivatives

    @pytest.mark.parametrize("shapes", [((3, 5), (5,), (3, 1)), ((), (2, 3), (3,)), ((2, 1, 3), (2, 1), (2, 2, 3))], ids=shape_id)
    def test_gradcheck(self, target: Target, generator: torch.Generator, shapes: Shapes) -> None:
        """Numerically, with vmap over the backward and with forward mode; then the second derivatives."""
        for options in self.op.options:
            leaves = [
                value.requires_grad_()
                for value in draw_arguments(self.op, generator, shapes, [torch.float64], target.device, smooth=True)
            ]

            def call(*values: Any, options: tuple[Any, ...] = options) -> Tensor:
                return target.run(self.op.call, *values, *options)  # type: ignore[no-any-return]

            exact = {"eps": 1e-6, "atol": 1e-6} if self.op.distance_to_kink else {}
            assert torch.autograd.gradcheck(call, leaves, check_batched_grad=True, check_forward_ad=True, **exact)
            assert torch.autograd.gradgradcheck(call, leaves, **exact)

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced"])
    def test_gradient_penalty(self, target: Target, generator: torch.Generator, layout: str) -> None:
        """The square of a gradient, differentiated again: nothing on the way asks for contiguous memory."""
        arguments = draw_arguments(
            self.op, generator, PER_CHANNEL, [torch.float64], target.device, [layout, "contiguous"], smooth=True
        )
        found = []
        for function in (lambda *values: target.run(self.op.call, *values), self.op.composed):
            leaves = [value.detach().requires_grad_() for value in arguments]
            y = function(*leaves, *self.op.options[0])
            first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))
        for gradient, right in zip(*found):
            assert_agree(gradient, right)

    # ---- layouts of the gradients themselves

    @pytest.mark.parametrize("layout", ["channels_last", "channels_last_3d"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    def test_memory_format_is_kept(self, target: Target, generator: torch.Generator, layout: str, dtype: torch.dtype) -> None:
        """By the result and by `x.grad`: a convolution after it stays fast."""
        shape, memory_format = (
            ((2, 8, 4, 6), torch.channels_last) if layout == "channels_last" else ((2, 8, 3, 4, 6), torch.channels_last_3d)
        )
        x = lay(draw(generator, shape, dtype, target.device), layout).requires_grad_()
        parameters = [draw(generator, (8, *(1,) * (len(shape) - 2)), dtype, target.device) for _ in self.op.inputs[1:]]
        y = target.run(self.op.call, x, *parameters, *self.op.options[0])
        y.backward(draw(generator, shape, dtype, target.device).contiguous(memory_format=memory_format))
        assert x.grad is not None
        assert y.is_contiguous(memory_format=memory_format)
        assert x.grad.is_contiguous(memory_format=memory_format)
