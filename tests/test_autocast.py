"""`torch.autocast`: an op of each class has the dtype and the values of what PyTorch would cast first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from checks import assert_agree, assert_close, in_float64
from layouts import draw
from targets import REFERENCE, Target
from torch import Tensor

from cupyfused import _op, fused_scale_bias
from cupyfused.ops.fused_scale_bias import OP


@pytest.fixture(params=["none", "promote", "float32"])
def autocast_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each class that an op can state; the op is fused_scale_bias, its calls are decided anew."""
    monkeypatch.setattr(OP, "autocast", request.param)
    monkeypatch.setattr(OP, "seen", {})  # what was seen is told by its tensors, and an op's class never changes
    monkeypatch.setattr(OP, "calls", {})
    yield request.param
    torch.compiler.reset()


def autocast_composed(kind: str, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """What autocast makes of an operation of that class: casts first."""
    differ = len({x.dtype, scale.dtype, bias.dtype} - {torch.float64}) > 1
    widest = torch.float32 if kind == "float32" or differ else x.dtype
    if kind != "none":
        x, scale, bias = (value.to(widest) if value.dtype is not torch.float64 else value for value in (x, scale, bias))
    return x * scale + bias


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_classes(target: Target, generator: torch.Generator, autocast_class: str, dtype: torch.dtype) -> None:
    """The dtype and the values of the cast expression, without a cast copy; gradients in the dtypes of the inputs."""
    for parameter, shape in ((dtype, (3, 1)), (torch.float32, (3, 1)), (torch.float32, ()), (torch.float64, ())):
        leaves = [
            draw(generator, (5, 3, 7), dtype, target.device).requires_grad_(),
            draw(generator, shape, parameter, target.device).requires_grad_(),
            draw(generator, (7,), dtype, target.device).requires_grad_(),
        ]
        calls: list[Callable[..., Tensor]] = [fused_scale_bias]
        if autocast_class == "none" or target is not REFERENCE:
            calls.append(torch.compile(fused_scale_bias, backend="aot_eager", fullgraph=True))
        for call in calls:
            with torch.autocast(target.device, dtype):
                y = call(*leaves)
            right = autocast_composed(autocast_class, *leaves)
            assert (y.dtype, y.shape) == (right.dtype, right.shape)
            x, scale, bias = in_float64(leaves)
            assert_close(y, x * scale + bias, torch.float32)
            grad_out = draw(generator, y.shape, y.dtype, target.device)
            for one, leaf in zip(torch.autograd.grad(y, leaves, grad_out), leaves, strict=True):
                assert (one.dtype, one.shape) == (leaf.dtype, leaf.shape)


def test_autocast_of_a_direct_call(target: Target, generator: torch.Generator) -> None:
    """An op made with another class has it as a registered operator too."""
    name = "fused_scale_bias_autocast_test"
    text = OP.functor.replace("fused_scale_bias", name)
    op = next((one for one in _op.OPS if one.name == name), None) or _op.Op(
        name=name, inputs=OP.inputs, options=(), reference=OP.reference, reads=OP.reads, autocast="float32", text=text
    )
    values = [draw(generator, shape, torch.bfloat16, target.device) for shape in ((5, 3, 7), (3, 1), (7,))]
    registered = getattr(torch.ops.cupyfused, name)
    with torch.autocast(target.device, torch.bfloat16):
        results = [op(*values), registered(*values)]
    for y in results:
        assert y.dtype is torch.float32
        assert_agree(y, values[0].float() * values[1].float() + values[2].float(), added=4)
    assert registered(*values).dtype is torch.bfloat16
