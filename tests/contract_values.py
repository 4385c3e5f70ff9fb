"""The forward part of the contract: values, dtype, shape, strides, memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from checks import FLOATS, INTEGERS, OpUnderTest, assert_same, check_forward, draw_arguments, snapshot
from layouts import EMPTY, LAYOUTS, SHAPES, SUMS, WIDTHS, Shapes, draw, lay, shape_id
from targets import Target
from torch import Tensor

__all__ = ["Values"]

MIXED = [pair for pair in itertools.product(FLOATS, FLOATS) if pair[0] != pair[1]]
LAID_OUT = (
    ((5, 7), torch.float32),
    ((1, 1, 3), torch.float32),
    ((2, 3, 5, 7), torch.bfloat16),
    ((2, 8, 2, 16), torch.bfloat16),
    ((2, 8, 2, 16), torch.float32),
    ((2, 3, 2, 5, 7), torch.float32),
)
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.5, -2.0, 1e-40)


class Values:
    """Every check of a result."""

    op: OpUnderTest

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("shapes", SHAPES + EMPTY + SUMS, ids=shape_id)
    def test_broadcast_shapes(self, target: Target, generator: torch.Generator, shapes: Shapes, dtype: torch.dtype) -> None:
        arguments = draw_arguments(self.op, generator, shapes, [dtype], target.device)
        for options in self.op.options:
            check_forward(self.op, target, arguments, options)

    @pytest.mark.parametrize(("shape", "dtype"), LAID_OUT, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(
        self, target: Target, generator: torch.Generator, layout: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """In x alone, in every input, and in the inputs beside a contiguous x."""
        for layouts in ([layout, "contiguous"], [layout], ["contiguous", layout]):
            arguments = draw_arguments(self.op, generator, (shape, shape[1:], shape), [dtype], target.device, layouts)
            check_forward(self.op, target, arguments, self.op.options[0])

    def test_layouts_and_shapes_at_random(self, target: Target, generator: torch.Generator) -> None:
        for _ in range(60):
            whole, shapes = random_shapes(generator, len(self.op.inputs))
            layouts = [list(LAYOUTS)[k] for k in torch.randint(len(LAYOUTS), (len(self.op.inputs),), generator=generator)]
            print(whole, shapes, layouts)
            arguments = draw_arguments(self.op, generator, shapes, [torch.float32], target.device, layouts)
            check_forward(self.op, target, arguments, self.op.options[0])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_widths(self, target: Target, generator: torch.Generator, width: int, dtype: torch.dtype) -> None:
        for rows, layout in ((1, "contiguous"), (3, "contiguous"), (3, "unaligned")):
            arguments = draw_arguments(self.op, generator, ((rows, width), (width,), (rows, 1)), [dtype], target.device, [layout])
            check_forward(self.op, target, arguments, self.op.options[0])

    # ---- dtypes

    @pytest.mark.parametrize(("x_dtype", "dtype"), MIXED, ids=str)
    def test_mixed_floats(self, target: Target, generator: torch.Generator, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
        for shape in ((3, 1, 1), ()):  # arrays of the other dtype promote, those without dims do not
            arguments = draw_arguments(self.op, generator, ((2, 3, 4, 8), shape, shape), [x_dtype, dtype], target.device)
            check_forward(self.op, target, arguments, self.op.options[0])
        one_alike = draw_arguments(self.op, generator, ((5, 7), (7,), (5, 1)), [x_dtype, dtype, x_dtype], target.device)
        check_forward(self.op, target, one_alike, self.op.options[0])

    @pytest.mark.parametrize("layouts", [("expanded last dim", "transposed"), ("overlapping", "transposed"), ("sliced",)], ids=str)
    def test_layouts_of_mixed_floats(self, target: Target, generator: torch.Generator, layouts: tuple[str, ...]) -> None:
        """PyTorch casts on a CPU before it chooses strides, and not on a GPU; the result lies as it does there."""
        for x_dtype, dtype in ((torch.float16, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.float32)):
            arguments = draw_arguments(self.op, generator, ((5, 7),) * 3, [x_dtype, dtype], target.device, layouts)
            check_forward(self.op, target, arguments, self.op.options[0])

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("x_dtype", [torch.uint8, torch.int64], ids=str)
    def test_integer_x_with_floating_parameters(
        self, target: Target, generator: torch.Generator, x_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        for shape in ((16,), ()):
            arguments = draw_arguments(self.op, generator, ((5, 16), shape, shape), [x_dtype, dtype], target.device)
            check_forward(self.op, target, arguments, self.op.options[0])

    @pytest.mark.parametrize("dtype", INTEGERS, ids=str)
    def test_integers_wrap(self, target: Target, generator: torch.Generator, dtype: torch.dtype) -> None:
        whole = torch.iinfo(dtype)
        full = [torch.randint(whole.min, whole.max, shape, generator=generator, dtype=dtype) for shape in ((5, 32), (32,), (5, 1))]
        for options in self.op.integer_options:
            check_forward(self.op, target, [value.to(target.device) for value in full[: len(self.op.inputs)]], options)

    @pytest.mark.parametrize(
        ("x_dtype", "dtype"),
        [(torch.uint8, torch.int8), (torch.uint8, torch.int64), (torch.int32, torch.int16), (torch.bool, torch.int16)],
        ids=str,
    )
    def test_mixed_integers(self, target: Target, generator: torch.Generator, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
        for shape in ((7,), ()):
            if x_dtype is torch.bool and not shape and not self.op.takes_bool:
                continue
            arguments = draw_arguments(self.op, generator, ((5, 7), shape, shape), [x_dtype, dtype], target.device)
            check_forward(self.op, target, arguments, self.op.integer_options[0])

    def test_bool(self, target: Target, generator: torch.Generator) -> None:
        mask = draw_arguments(self.op, generator, ((5, 7), (7,), (5, 1)), [torch.bool], target.device)
        if self.op.takes_bool:
            check_forward(self.op, target, mask, ())
            check_forward(self.op, target, [mask[0][:1].expand(5, 7), *mask[1:]], ())
        else:
            with pytest.raises(TypeError, match="bool"):
                target.run(self.op.call, *mask, *[True] * len(self.op.options[0]))

    def test_default_dtype_of_numbers(self, target: Target, generator: torch.Generator) -> None:
        x = draw(generator, (5, 7), torch.int32, target.device)
        numbers = [1.5] * (len(self.op.inputs) - 1)
        torch.set_default_dtype(torch.float64)
        try:
            assert check_forward(self.op, target, [x, *numbers], self.op.options[0]).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert check_forward(self.op, target, [x, *numbers], self.op.options[0]).dtype is torch.float32

    # ---- numbers

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("value", [2, 1, -3])
    def test_every_spelling_of_a_number(self, target: Target, generator: torch.Generator, value: int, dtype: torch.dtype) -> None:
        spelled: list[Any] = [
            value,
            np.float16(value),
            np.float32(value),
            np.float64(value),
            np.int64(value),
            np.int8(value),
            np.array(float(value)),
            np.array(value),
        ]
        spelled += [
            torch.tensor(value, dtype=kind) for kind in (torch.float32, torch.float64, torch.int64)
        ]  # on the CPU beside CUDA too
        spelled += [one.to(target.device) for one in spelled if isinstance(one, Tensor)]
        spelled += [True, np.True_, np.array(True)] if value == 1 else []
        x = draw(generator, (5, 16), dtype, target.device)
        parameters = len(self.op.inputs) - 1
        expected = check_forward(self.op, target, [x, *[float(value)] * parameters], self.op.options[0])
        for one in spelled:
            assert_same(target.run(self.op.call, x, *[one] * parameters, *self.op.options[0]), expected)

    @pytest.mark.parametrize("make", [np.float32, np.float64, np.array], ids=lambda make: make.__name__)
    def test_every_spelling_of_an_option(self, target: Target, generator: torch.Generator, make: Any) -> None:
        arguments = draw_arguments(self.op, generator, ((5, 16), (16,), (5, 1)), [torch.float32], target.device)
        for options in self.op.options:
            expected = target.run(self.op.call, *arguments, *options)
            spelled = [option if option is None else make(option) for option in options]
            assert_same(target.run(self.op.call, *arguments, *spelled), expected)

    @pytest.mark.parametrize(
        ("dtype", "number"),
        [(torch.float32, 1e300), (torch.bfloat16, -1e300), (torch.int32, 2**40 + 3), (torch.uint8, -5), (torch.int8, 300)],
    )
    def test_numbers_beyond_the_dtype(self, target: Target, generator: torch.Generator, dtype: torch.dtype, number: float) -> None:
        """Floats overflow to infinity and integers wrap, as in the composed expression."""
        x = draw(generator, (5, 16), dtype, target.device)
        options = self.op.options[0] if dtype.is_floating_point else self.op.integer_options[0]
        numbers = [number, 1, 1][: len(self.op.inputs) - 1]
        assert_same(target.run(self.op.call, x, *numbers, *options), self.op.composed(x, *numbers, *options))

    # ---- special values

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_nan_and_infinity(self, target: Target, dtype: torch.dtype) -> None:
        grid = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=torch.float64)] * len(self.op.inputs)).to(target.device, dtype)
        arguments = list(grid.unbind(1))
        exact = [value.double() if dtype is torch.float64 else value.float() for value in arguments]
        for options in self.op.options:
            assert_same(target.run(self.op.call, *arguments, *options), self.op.composed(*exact, *options).to(dtype))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_all_16_bit_values(self, target: Target, dtype: torch.dtype) -> None:
        """Loaded, carried through the arithmetic and rounded back, in packets and one by one."""
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).to(target.device)
        numbers = {"x": x, "scale": 1, "bias": -0.0}  # -0.0 keeps the sign of zeros
        for view in (x, lay(x, "unaligned")):
            y = target.run(self.op.call, view, *[numbers[name] for name in self.op.inputs[1:]], *unbounded(self.op))
            assert torch.equal(y.isnan(), x.isnan())
            assert torch.equal(y.view(torch.int16)[~x.isnan()], x.view(torch.int16)[~x.isnan()])

    # ---- memory

    @pytest.mark.parametrize("shape", [(5, 7), (), (3, 16)], ids=str)
    def test_result_never_aliases(self, target: Target, generator: torch.Generator, shape: tuple[int, ...]) -> None:
        """Where the op changes nothing, in particular."""
        x = draw(generator, shape, torch.float32, target.device)
        y = target.run(self.op.call, x, 1, *[0] * (len(self.op.inputs) - 2), *unbounded(self.op))
        before = snapshot([x])
        y.fill_(7.0)
        assert torch.equal(before[0], snapshot([x])[0])


def unbounded(op: OpUnderTest) -> tuple[None, ...]:
    """Return all options left out."""
    return (None,) * len(op.options[0])


def random_shapes(generator: torch.Generator, count: int) -> tuple[tuple[int, ...], Shapes]:
    """Draw a shape and shapes that broadcast to it, with dims left out or 1."""
    ndim = int(torch.randint(1, 6, (), generator=generator))
    whole = tuple(int(extent) for extent in torch.randint(1, 9, (ndim,), generator=generator))
    shapes = []
    for _ in range(count):
        keep = torch.rand(ndim, generator=generator) > 0.35
        first = int(torch.randint(0, 2, (), generator=generator) * torch.randint(0, ndim, (), generator=generator))
        shapes.append(tuple(extent if kept else 1 for extent, kept in zip(whole, keep))[first:])
    return whole, tuple(shapes)
