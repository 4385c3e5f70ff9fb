"""What no kernel may trust: saved tensors that hooks changed, gradients without memory, arguments of the operators themselves."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from checks import assert_agree
from layouts import draw
from targets import Target
from torch import Tensor

from cupyfused import DtypeError, OperandError, _op, fused_scale_bias, fused_scale_bias_clamp

HOOKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "kept in bfloat16": (lambda one: one.bfloat16(), lambda one: one),
    "kept in float32": (lambda one: one.float(), lambda one: one),
    "a lazily negated view": (lambda one: one, lambda one: torch._neg_view(-one)),
    "other strides": (lambda one: one, lambda one: torch.stack([one, one], -1)[..., 0]),
}


def leaves_of(generator: torch.Generator, target: Target) -> list[Tensor]:
    return [draw(generator, shape, torch.float64, target.device).requires_grad_() for shape in ((5, 8), (8,), (5, 1))]


@pytest.mark.parametrize("hook", HOOKS)
def test_saved_tensors_are_what_hooks_give_back(target: Target, generator: torch.Generator, hook: str) -> None:
    """Of another dtype, sign or layout: gradients are those of PyTorch's operations with the same hooks."""
    leaves = leaves_of(generator, target)
    results = []
    for function in (fused_scale_bias, lambda x, scale, bias: x * scale + bias):
        with torch.autograd.graph.saved_tensors_hooks(*HOOKS[hook]):
            y = function(*leaves)
        results.append(torch.autograd.grad(y.sum(), leaves))
    for one, right in zip(*results, strict=True):
        assert_agree(one.double(), right.double())


def test_a_gradient_without_memory(target: Target, generator: torch.Generator) -> None:
    leaves = leaves_of(generator, target)
    for gradient in torch.autograd.grad(
        fused_scale_bias(*leaves), leaves, torch._efficientzerotensor((5, 8), dtype=torch.float64, device=target.device)
    ):
        assert not gradient.any()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_gradient(target: Target, generator: torch.Generator) -> None:
    """An embedding that was scaled and shifted."""
    weight = draw(generator, (7, 3), torch.float64, target.device).requires_grad_()
    index = torch.tensor([1, 5, 1], device=target.device)
    results = []
    for function in (fused_scale_bias, lambda x, scale, bias: x * scale + bias):
        picked = torch.nn.functional.embedding(index, function(weight, 2.0, 0.5), sparse=True)
        results.append(torch.autograd.grad(picked.square().sum(), weight)[0])
    assert_agree(results[0].to_dense(), results[1].to_dense())


@pytest.mark.parametrize("around", ["save_on_cpu", "checkpoint"])
def test_double_backward_under_hooks(target: Target, generator: torch.Generator, around: str) -> None:
    """A gradient penalty inside a checkpoint: PyTorch keeps that with hooks."""
    leaves = leaves_of(generator, target)
    results = []
    for function in (fused_scale_bias_clamp, lambda x, scale, bias, low, high: torch.clamp(x * scale + bias, low, high)):

        def penalty(*inputs: Tensor, function: Any = function) -> Tensor:
            y = function(*inputs, -4.0, 4.0).square().sum()
            return torch.stack([one.square().sum() for one in torch.autograd.grad(y, inputs, create_graph=True)]).sum()

        if around == "checkpoint":
            loss = torch.utils.checkpoint.checkpoint(penalty, *leaves, use_reentrant=False)
        else:
            with torch.autograd.graph.save_on_cpu():
                loss = penalty(*leaves)
        results.append(torch.autograd.grad(loss, leaves))
    for one, right in zip(*results, strict=True):
        assert_agree(one, right)


# ---- the operators themselves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad_out", "inputs", "mask", "argument"),
    [
        (torch.ones(7), torch.ones(10), [True] * 3, "grad_out"),
        (torch.ones(1), torch.ones(10), [True] * 3, "grad_out"),
        (torch.ones(10, dtype=torch.int64), torch.ones(10), [True] * 3, "grad_out"),
        (torch.ones(10), torch.ones(10), [True], "mask"),
        (torch.ones(10), torch.arange(10), [True] * 3, "mask"),
    ],
)
def test_arguments_of_a_backward_operator(
    target: Target, grad_out: Tensor, inputs: Tensor, mask: list[bool], argument: str
) -> None:
    """Called by hand with what autograd would not pass: an error, and no kernel beside its arrays."""
    if not target.runs_kernels:
        pytest.skip("PyTorch's own operations check for themselves")
    backward = torch.ops.cupyfused.fused_scale_bias_backward
    tensors = [one.to(target.device) for one in (grad_out, inputs, inputs, inputs)]
    with pytest.raises(OperandError, match=argument):
        backward(*tensors, mask=mask, numbers=False)


@pytest.mark.parametrize("mode", ["decompose", "opaque"])
@pytest.mark.parametrize("bound", [Fraction(1, 2), Decimal("0.5"), [0.5], 0.5 + 0j, np.array([0.5])], ids=repr)
def test_a_bound_that_is_no_number_in_compiled_code(monkeypatch: pytest.MonkeyPatch, mode: str, bound: Any) -> None:
    """It is refused, never dropped."""
    monkeypatch.setattr("cupyfused._settings.compile_mode", mode)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: fused_scale_bias_clamp(x, 1.0, 0.0, bound, None), backend="eager")
    with pytest.raises(DtypeError, match="min_val"):
        compiled(torch.linspace(-1, 1, 5))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache.")  # where it goes on after the error
def test_impl_in_compiled_code() -> None:
    """Asking for CUDA on the CPU is an error there too."""
    torch.compiler.reset()
    with pytest.raises(OperandError, match="CUDA arrays with impl='cuda'"):
        torch.compile(lambda x: fused_scale_bias(x, 1.0, 0.0, impl="cuda"), backend="eager")(torch.ones(3))


def test_the_sign_of_zero_in_compiled_code() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: fused_scale_bias(x, 1.0, -0.0), backend="eager", fullgraph=True)
    assert torch.signbit(compiled(torch.tensor([-0.0]))).all()


def test_a_tangent_of_a_bound_is_not_dropped(generator: torch.Generator) -> None:
    """Also where the other bound is a number."""
    x = torch.tensor([-1.0, 0.0, 1.0])
    for other in (None, 0.5, torch.tensor(0.5)):
        _, tangent = torch.func.jvp(
            lambda low, other=other: fused_scale_bias_clamp(x, 1.0, 0.0, low, other), (torch.tensor(-0.5),), (torch.tensor(1.0),)
        )
        assert tangent.tolist() == [1.0, 0.0, 0.0]


def test_an_op_of_one_input(generator: torch.Generator) -> None:
    """Its backward returns one gradient, and no tuple, on every route."""
    name = "halved_for_a_test"
    text = f"""
struct {name} {{
    template <typename T> static __device__ __forceinline__ T forward(T x) {{ return x * (T)0.5; }}
    template <typename T> static __device__ __forceinline__ void backward(T grad_out, T x, T& grad_x)
    {{
        grad_x = grad_out * (T)0.5;
    }}
}};
"""
    op = next((one for one in _op.OPS if one.name == name), None) or _op.Op(
        name=name, inputs=("x",), options=(), reference=lambda namespace, x: x * 0.5, reads={"x": ()}, text=text
    )
    x = draw(generator, (4, 3), torch.float64).requires_grad_()
    registered = getattr(torch.ops.cupyfused, name)
    for call in (op, registered):
        assert_agree(call(x), x * 0.5)
        (gradient,) = torch.autograd.grad(call(x).square().sum(), x)
        assert_agree(gradient, x * 0.5)
        for found in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
            assert_agree(found(lambda one, call=call: call(one).square().sum())(x.detach()), x * 0.5)
