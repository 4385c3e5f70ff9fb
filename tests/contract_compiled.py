"""The compiling part of the contract: torch.library, torch.compile in both modes, export."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from checks import OpUnderTest, assert_agree, assert_close, draw_arguments, in_float64
from contract_calls import LAST_DIM, PER_CHANNEL
from layouts import LAYOUTS, Shapes, draw, shape_id
from targets import REFERENCE, Target
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import cupyfused

__all__ = ["Compiled"]

FAKE_SHAPES: tuple[Shapes, ...] = (
    PER_CHANNEL,
    ((16,), (5, 1), (5, 16)),
    ((4, 1, 6), (5, 1), (4, 5, 6)),
    ((2, 1, 3, 1, 5), (1, 3, 1, 1), (2, 1, 1, 1, 5)),
    ((4, 0, 5), (5,), (4, 1, 1)),
)
MODES = ("decompose", "opaque")


def significant(tensor: Tensor) -> list[int]:
    """Return the strides that say where elements lie; PyTorch's own fake results differ from its real ones in the others."""
    return [stride for stride, extent in zip(tensor.stride(), tensor.shape) if extent > 1] if tensor.numel() else []


class Compiled:
    """Every check of a call in a graph."""

    op: OpUnderTest

    @pytest.fixture(params=MODES)
    def mode(self, request: pytest.FixtureRequest) -> Iterator[str]:
        """Each setting of what stands in a graph; nothing compiled is left behind."""
        torch.compiler.reset()
        cupyfused.set_compile_mode(request.param)
        yield request.param
        cupyfused.set_compile_mode("decompose")
        torch.compiler.reset()

    # ---- torch.library

    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # AOT's own test reads it of copies
    @pytest.mark.parametrize("shapes", [PER_CHANNEL, LAST_DIM, ((), (2, 3), (3,)), ((0, 4), (4,), ())], ids=shape_id)
    def test_opcheck(self, target: Target, generator: torch.Generator, shapes: Shapes) -> None:
        """Schema, fake kernel, autograd registration and AOT dispatch, of the operator and of its backward."""
        for dtype in (torch.float32, torch.bfloat16):
            arguments = draw_arguments(self.op, generator, shapes, [dtype], target.device, smooth=True)
            options = [torch.tensor(option, dtype=dtype, device=target.device) for option in self.op.options[0]]
            leaves = [value.clone().requires_grad_() for value in arguments]
            assert set(torch.library.opcheck(self.op.registered, (*leaves, *options)).values()) == {"SUCCESS"}
            grad_out = draw(generator, self.op.composed(*arguments, *options).shape, dtype, target.device)
            backward = getattr(torch.ops.cupyfused, f"{self.op.call.__name__}_backward").default
            for mask in ([True] * len(arguments), [False, *[True] * (len(arguments) - 1)]):
                keywords = {"mask": mask, "numbers": False}
                checked = torch.library.opcheck(backward, (grad_out, *arguments, *options), keywords)
                assert set(checked.values()) == {"SUCCESS"}

    @pytest.mark.parametrize("shapes", FAKE_SHAPES, ids=shape_id)
    def test_fake_results_are_the_real_ones(self, target: Target, generator: torch.Generator, shapes: Shapes) -> None:
        """Shape, dtype and strides, forward and backward, in every layout; what a compiled graph takes for granted."""
        for layout in LAYOUTS:
            real = draw_arguments(self.op, generator, shapes, [torch.float32], target.device, [layout, "contiguous"])
            self._compare_with_fake(real)

    @pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float64"), ("uint8", "float16"), ("int64", "int32")])
    def test_fake_results_of_mixed_dtypes(self, target: Target, generator: torch.Generator, dtypes: tuple[str, str]) -> None:
        x_dtype, dtype = (getattr(torch, name) for name in dtypes)
        for layout in ("contiguous", "channels_last", "transposed", "sliced", "expanded"):
            for shapes in (PER_CHANNEL, ((2, 8, 4, 16), (8, 1, 1), ())):
                real = draw_arguments(self.op, generator, shapes, [x_dtype, dtype], target.device, [layout, "contiguous"])
                self._compare_with_fake(real)

    def _compare_with_fake(self, real: list[Tensor]) -> None:
        options = [torch.tensor(option, device=real[0].device) for option in self.op.options[0]]
        y = self.op.registered(*real, *options)
        mask = [value.is_floating_point() for value in real]
        backward = getattr(torch.ops.cupyfused, f"{self.op.call.__name__}_backward").default
        gradients = backward(torch.ones_like(y), *real, *options, mask=mask, numbers=False) if y.is_floating_point() else ()
        with torch._subclasses.FakeTensorMode() as fake_mode:
            fake = [fake_mode.from_tensor(value) for value in real]
            fake_options = [fake_mode.from_tensor(option) for option in options]
            fake_y = self.op.registered(*fake, *fake_options)
            fake_gradients = backward(torch.empty_like(fake_y), *fake, *fake_options, mask=mask, numbers=False) if gradients else ()
        for one, right in zip((fake_y, *fake_gradients), (y, *gradients), strict=True):
            if right is None:
                assert one is None
            else:
                assert (one.shape, one.dtype, significant(one)) == (right.shape, right.dtype, significant(right))

    # ---- torch.compile

    @pytest.mark.parametrize("dynamic", [None, True, False])
    def test_compiled_values_and_gradients(
        self, target: Target, generator: torch.Generator, mode: str, dynamic: bool | None
    ) -> None:
        """No graph break; the same numbers as the call that is not compiled."""
        for options in self.op.options:
            function = self.op.fused(target._replace(impl="auto"), options)
            compiled = torch.compile(
                lambda *values, f=function: f(*values) * 2, backend="aot_eager", fullgraph=True, dynamic=dynamic
            )
            for rows in (4, 5):
                leaves = self._leaves(generator, target, rows)
                self._agree(compiled(*leaves), self.op.composed(*leaves, *options) * 2, leaves)

    def _leaves(self, generator: torch.Generator, target: Target, rows: int) -> list[Tensor]:
        shapes = ((rows, 3, 7), (3, 1), (rows, 1, 1))
        return [
            value.requires_grad_()
            for value in draw_arguments(self.op, generator, shapes, [torch.float64], target.device, smooth=True)
        ]

    def _agree(self, y: Tensor, right: Tensor, leaves: Sequence[Tensor]) -> None:
        assert_agree(y, right)
        assert y.stride() == right.stride()
        for gradient, one in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (y, right)), strict=True):
            assert_agree(gradient, one)

    @pytest.mark.parametrize("dynamic", [None, True])
    def test_recompilations(self, target: Target, generator: torch.Generator, mode: str, dynamic: bool | None) -> None:
        """At the first change of a number or of the batch size once if PyTorch finds out what changes, never if it is told."""
        if target is REFERENCE:
            pytest.skip("what is compiled does not depend on who computes, which is tested with the kernels")
        few = [1, 2, 2, 2] if dynamic is None else [1] * 4
        options = self.op.options[0]
        changing: dict[str, Callable[[Any, float], Any]] = {
            "scale": lambda values, number: self.op.call(values[0], number, *values[2:], *options),
            "bias": lambda values, number: self.op.call(*values[:2], number, *options),
        }
        for k in range(len(options)):
            # As it comes: arithmetic on it first makes a constant of it before torch 2.13.
            changing[f"option {k}"] = lambda values, number, k=k: self.op.call(*values, *options[:k], number, *options[k + 1 :])
        leaves = self._leaves(generator, target, 4)
        for name, call in changing.items():
            torch.compiler.reset()
            counter, counts = CompileCounterWithBackend("aot_eager"), []
            compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic)
            for number in (0.5, 0.25, 0.75, 1.5):
                y, right = compiled(leaves, number), call(leaves, number)
                self._agree(y, right, leaves[:1])
                counts.append(counter.frame_count)
            assert counts == few, name
        counter, counts = CompileCounterWithBackend("aot_eager"), []
        compiled = torch.compile(
            self.op.fused(target._replace(impl="auto"), options), backend=counter, fullgraph=True, dynamic=dynamic
        )
        for rows in (4, 5, 8, 23):
            leaves = self._leaves(generator, target, rows)
            self._agree(compiled(*leaves), self.op.composed(*leaves, *options), leaves)
            counts.append(counter.frame_count)
        assert counts == few

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced", "expanded", "unaligned"])
    def test_compiled_layouts(self, target: Target, generator: torch.Generator, mode: str, layout: str) -> None:
        """Strides of results and gradients are those of the trace, so that no assertion of a compiled graph fires."""
        options = self.op.options[0]
        compiled = torch.compile(self.op.fused(target._replace(impl="auto"), options), backend="aot_eager", fullgraph=True)
        for dtype in (torch.float32, torch.bfloat16):
            x, *parameters = draw_arguments(
                self.op,
                generator,
                ((2, 8, 4, 16), (8, 1, 1), (8, 1, 1)),
                [dtype],
                target.device,
                [layout, "contiguous"],
                smooth=True,
            )
            leaves = [value.detach().requires_grad_() for value in (x, *parameters)]
            y, right = compiled(*leaves), self.op.composed(*leaves, *options)
            assert (y.dtype, y.stride()) == (right.dtype, right.stride())
            assert_close(y, self.op.composed(*in_float64(leaves), *options), torch.float32)

    def test_compiled_transforms(self, target: Target, generator: torch.Generator, mode: str) -> None:
        """`vmap` and `grad` inside a compiled function."""
        values = draw_arguments(self.op, generator, ((2, 3, 5), (3, 1), (5,)), [torch.float64], target.device, smooth=True)
        function, plain = self.op.both(target._replace(impl="auto"), self.op.options[0])

        def per_sample(f: Any, *inputs: Tensor) -> Any:
            gradient = torch.func.grad(lambda *all: f(*all).square().sum(), argnums=(0, 1, 2))
            return torch.func.vmap(gradient, in_dims=(0, None, None))(*inputs)

        compiled = torch.compile(lambda *inputs: per_sample(function, *inputs), backend="aot_eager", fullgraph=True)
        for one, right in zip(compiled(*values), per_sample(plain, *values), strict=True):
            assert_agree(one, right)

    def test_compiled_out(self, target: Target, generator: torch.Generator, mode: str) -> None:
        """Written to, also where it is an input, or a view of one; an `out` that does not fit is refused."""
        arguments = draw_arguments(self.op, generator, LAST_DIM, [torch.float32], target.device)
        options = self.op.options[0]
        expected = target.run(self.op.call, *arguments, *options)

        def call(out: Tensor, *inputs: Tensor) -> Tensor:
            return self.op.call(*inputs, *options, out=out)  # type: ignore[no-any-return]

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        out = torch.empty_like(expected)
        compiled(out, *arguments)
        assert_agree(out, expected, added=1)
        whole = torch.zeros((2, *expected.shape), dtype=expected.dtype, device=target.device)
        compiled(whole[1], *arguments)
        assert_agree(whole[1], expected, added=1)
        assert not whole[0].any()
        compiled(arguments[0], *arguments)
        assert_agree(arguments[0], expected, added=1)

    # ---- export

    def test_export(self, target: Target, generator: torch.Generator, mode: str) -> None:
        """Saved, loaded and run with other data and another batch size; decomposed it holds PyTorch's operations only."""
        op, options = self.op, self.op.options[0]

        class Model(torch.nn.Module):
            def forward(self, *values: Tensor) -> Tensor:
                return op.call(*values, *options)  # type: ignore[no-any-return]

        batch = torch.export.Dim("batch", min=2)
        dynamic = (({0: batch}, None, {0: batch}),)
        program = torch.export.export(Model(), tuple(self._leaves(generator, target, 4)), dynamic_shapes=dynamic)
        names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert any("cupyfused" in name for name in names) == (mode == "opaque")
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for rows in (4, 7):
            leaves = self._leaves(generator, target, rows)
            self._agree(loaded(*leaves), self.op.composed(*leaves, *options), leaves)
