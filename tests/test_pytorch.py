"""How an op stands in PyTorch's other machinery: tensor classes, modes, autocast, profiler. On every target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_agree, assert_same
from layouts import draw
from targets import HOST, Target
from torch import Tensor

import cupyfused
from cupyfused import fused_scale_bias, fused_scale_bias_clamp

NAME = "cupyfused.fused_scale_bias_clamp"


def composed(x: Any, scale: Any, bias: Any) -> Tensor:
    return torch.clamp(x * scale + bias, -0.75, 0.875)


def fused(x: Any, scale: Any, bias: Any) -> Tensor:
    return fused_scale_bias_clamp(x, scale, bias, -0.75, 0.875)


def arguments(generator: torch.Generator, target: Target, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [draw(generator, shape, dtype, target.device) for shape in ((5, 3, 7), (3, 1), (7,))]


# ---- classes of tensors -----------------------------------------------------------------------------------------------------


class Named(Tensor):
    """A user's class that changes nothing and keeps a list of what it was asked to do."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_class_with_torch_function_sees_the_operator(target: Target, generator: torch.Generator) -> None:
    """And the result is of that class, as the composed one is; also where only a parameter is of it."""
    values = arguments(generator, target)
    for k in range(3):
        mixed = [value.as_subclass(Named) if k == place else value for place, value in enumerate(values)]
        Named.seen.clear()
        y = fused(*mixed)
        assert any(NAME in one for one in Named.seen)
        assert type(y) is Named
        assert_agree(y.as_subclass(Tensor), composed(*values))
    leaf = values[0].as_subclass(Named).requires_grad_()
    found, right = (torch.autograd.grad(function(leaf, *values[1:]).sum(), leaf)[0] for function in (fused, composed))
    assert_agree(found.as_subclass(Tensor), right.as_subclass(Tensor))


class Wrapper(Tensor):
    """A class that computes for itself, as DTensor and quantised weights do; it holds another tensor, and no memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "cupyfused" in str(function):
            raise NotImplementedError(f"{function} is not known here")
        args, kwargs = torch.utils._pytree.tree_map_only(Wrapper, lambda one: one.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Wrapper, function(*args, **kwargs))


def test_a_class_with_torch_dispatch_computes_for_itself(target: Target, generator: torch.Generator) -> None:
    values = arguments(generator, target)
    y = fused(Wrapper(values[0]), *values[1:])
    assert type(y) is Wrapper
    assert_agree(y.inner, composed(*values))
    assert type(fused(values[0], Wrapper(values[1]), values[2])) is Wrapper
    with pytest.raises(ValueError, match=r"plain tensors with impl='cuda'.*Wrapper|CUDA arrays with impl='cuda'"):
        fused_scale_bias(Wrapper(values[0]), 2.0, 1.0, impl="cuda")


@pytest.fixture
def mesh(target: Target, tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh

    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh(target.device, (1,))
    destroy_process_group()


def test_dtensor(target: Target, generator: torch.Generator, mesh: Any) -> None:
    """Sharded and replicated operands, forward and backward, by the rules that PyTorch has for its own operations."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, scale, bias = arguments(generator, target)
    leaves = [distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(scale, mesh, [Replicate()])]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    plain = [x.requires_grad_(), scale.requires_grad_()]
    y, right = fused(leaves[0], leaves[1], distribute_tensor(bias, mesh, [Replicate()])), composed(*plain, bias)
    assert y.placements == (Shard(0),)  # type: ignore[attr-defined]
    assert_agree(y.full_tensor(), right)  # type: ignore[attr-defined]
    for one, gradient in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(right.sum(), plain), strict=True):
        assert_agree(one.full_tensor(), gradient)  # type: ignore[attr-defined]


def test_inference_tensors(target: Target, generator: torch.Generator) -> None:
    with torch.inference_mode():
        values = arguments(generator, target)
        y = fused(*values)
        assert y.is_inference()
    assert_agree(fused(*values), composed(*values))
    leaf = draw(generator, (7,), torch.float64, target.device).requires_grad_()
    for function in (fused, composed):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            function(values[0], values[1], values[2] * leaf)


def test_meta_tensors() -> None:
    """Shape, dtype, strides and a graph, and no memory."""
    x = torch.empty_strided((4, 3, 8), (1, 32, 4), device="meta", dtype=torch.bfloat16, requires_grad=True)
    scale = torch.empty((3, 1), device="meta", requires_grad=True)
    y, right = (function(x, scale, 0.5) for function in (fused, composed))
    assert (y.shape, y.dtype, y.stride(), y.device) == (right.shape, right.dtype, right.stride(), right.device)
    gradients = torch.autograd.grad(y, (x, scale), torch.empty_like(y))
    assert [(one.shape, one.dtype, one.device.type) for one in gradients] == [(one.shape, one.dtype, "meta") for one in (x, scale)]


def test_gradients_of_another_dtype(target: Target, generator: torch.Generator) -> None:
    """What comes in beside a bfloat16 result is cast by autograd; one of another shape is refused."""
    values = arguments(generator, target, torch.bfloat16)
    leaves = [value.requires_grad_() for value in values]

    def scale_bias(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:  # no bound, which two roundings could cross
        return x * scale + bias

    for dtype in (torch.float32, torch.float64):
        grad_out = draw(generator, (5, 3, 7), dtype, target.device)
        both = [torch.autograd.grad(function(*leaves), leaves[0], grad_out)[0] for function in (fused_scale_bias, scale_bias)]
        assert both[0].dtype is torch.bfloat16
        assert_agree(both[0], both[1], added=1)
    for function in (fused, composed):
        with pytest.raises(RuntimeError, match="Mismatch in shape"):
            torch.autograd.grad(function(*leaves), leaves[0], grad_out[:3])


def test_an_integer_tensor_cannot_ask_for_a_gradient(target: Target) -> None:
    x = torch.arange(6, device=target.device)
    with pytest.raises(RuntimeError, match="floating point"):
        x.requires_grad_()
    scale = torch.ones((), dtype=torch.float64, device=target.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(fused_scale_bias(x, scale, x).sum(), scale)
    assert gradient.item() == 15


def test_apply_under_functorch_is_loud(generator: torch.Generator) -> None:
    """The Function of plain calls has no rules for transforms; the public function has."""
    x, scale, bias = arguments(generator, HOST)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: cupyfused.FusedScaleBias.apply(x, scale, bias).sum())(x)


def test_double_backward_of_a_compiled_function_is_refused(generator: torch.Generator) -> None:
    """By PyTorch itself, for its own operations as for ours; never a wrong number."""
    torch.compiler.reset()
    leaves = [value.requires_grad_() for value in arguments(generator, HOST)]
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    (first,) = torch.autograd.grad(compiled(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


# ---- modes ------------------------------------------------------------------------------------------------------------------


def test_a_dispatch_mode_sees_one_operator_forward_and_one_backward(target: Target, generator: torch.Generator) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    leaves = [value.requires_grad_() for value in arguments(generator, target)]
    with Log() as log:
        gradients = torch.autograd.grad(fused(*leaves).sum(), leaves)
    ours = [name for name in log.names if "cupyfused" in name]
    assert ours == [f"{NAME}.default", f"{NAME}_backward.default"]
    for one, right in zip(gradients, torch.autograd.grad(composed(*leaves).sum(), leaves), strict=True):
        assert_agree(one, right)


def test_make_fx_records_the_operator_and_replays_right(target: Target, generator: torch.Generator) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(fused)(*arguments(generator, target))
    assert any(NAME in str(node.target) for node in traced.graph.nodes)
    values = arguments(generator, target)
    assert_agree(traced(*values), composed(*values))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:")
def test_jit_trace_replays_right(target: Target, generator: torch.Generator) -> None:
    traced = torch.jit.trace(fused, tuple(arguments(generator, target)))
    values = arguments(generator, target)
    assert_agree(traced(*values), composed(*values))


# ---- profiler -----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # PyTorch says so of every profile
def test_profiles_carry_the_name_of_the_op(target: Target, generator: torch.Generator) -> None:
    """Host ranges of calls with and without a gradient and of the backward; on a GPU the kernels too."""
    values = arguments(generator, target)
    leaves = [value.clone().requires_grad_() for value in values]
    fused(*leaves).sum().backward()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if target.device == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profile:
        fused(*values)
        fused(*leaves).sum().backward()
        if target.device == "cuda":
            torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    on_host = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]
    assert on_host.count("fused_scale_bias_clamp") == 2
    if target.runs_kernels:
        assert any("FusedScaleBiasClampBackward" in name for name in names)
    if target.device == "cuda":
        assert any(name.startswith("fused_scale_bias_clamp_forward") for name in names)
        assert any(name.startswith("fused_scale_bias_clamp_backward") for name in names)


# ---- settings ---------------------------------------------------------------------------------------------------------------


def test_compile_modes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"set_compile_mode.*decompose or opaque.*'inline'"):
        cupyfused.set_compile_mode("inline")  # type: ignore[arg-type]


def test_a_change_of_mode_compiles_again(generator: torch.Generator) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fused, backend=counter, fullgraph=True)
    values = arguments(generator, HOST)
    for mode in ("decompose", "opaque", "decompose"):
        cupyfused.set_compile_mode(mode)  # type: ignore[arg-type]
        assert_agree(compiled(*values), composed(*values))
    assert counter.frame_count == 2
    assert_same(compiled(*values), composed(*values))
