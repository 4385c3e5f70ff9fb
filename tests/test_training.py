"""Training with `ScaleBiasClamp` and the functions: checkpoints, copies, mixed precision, gradient penalties, loss for loss."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from checks import assert_agree, assert_close, assert_same, in_float64  # noqa: E402  (after importorskip: it imports torch)
from layouts import draw, lay  # noqa: E402
from models import COMPOSED, FUSED, SIDE, Network, Operators, redraw, train  # noqa: E402
from targets import Target  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import checkpoint as checkpoints  # noqa: E402

from cupyfused.errors import OperandError  # noqa: E402
from cupyfused.nn import ScaleBiasClamp  # noqa: E402

Build = Callable[[Operators], nn.Module]


def both(build: Build, target: Target, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Build a model with the operators and one without, with the same random parameters."""
    fused, composed = (build(operators).to(target.device, dtype) for operators in (FUSED, COMPOSED))
    redraw(composed, generator)
    fused.load_state_dict(composed.state_dict())
    return [fused, composed]


def images(target: Target, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return draw(generator, (4, 3, SIDE, SIDE), dtype, target.device)


def assert_parameters_agree(*models: nn.Module) -> None:
    one, right = (model.state_dict() for model in models)
    for name, value in right.items():
        assert_agree(one[name], value)


# ---- loss for loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "last dim"])
def test_training_loss_for_loss(target: Target, generator: torch.Generator, layout: str) -> None:
    def build(operators: Operators) -> nn.Module:
        if layout == "last dim":
            return nn.Sequential(nn.Linear(SIDE, 5), operators.module(5, -0.75, 0.75, dim=-1))
        return nn.Sequential(nn.Conv2d(3, 5, 3), operators.module(5, -0.75, 0.75))

    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x = images(target, generator).to(memory_format=memory_format)
    fused, composed = both(build, target, generator)
    before = composed(x)
    assert fused(x).stride() == before.stride()  # of channels_last on the CPU; cuDNN lays float64 out as it likes
    right = draw(generator, before.shape, torch.float64, target.device)
    losses, expected = (train(model, x, right, steps=20) for model in (fused, composed))
    assert expected.unique().numel() == 20
    assert_agree(losses, expected)
    assert_parameters_agree(fused, composed)


def test_gradient_penalty(target: Target, generator: torch.Generator) -> None:
    """The R1 penalty of adversarial training: a loss of the gradient of the discriminator, differentiated again."""

    def build(operators: Operators) -> nn.Module:
        features = nn.Sequential(nn.Conv2d(3, 5, 3), operators.module(5, -1.0, 1.0), nn.Tanh(), nn.Flatten(), nn.Linear(80, 7))
        return nn.Sequential(features, operators.module(7, -2.0, 2.0, dim=-1), nn.Linear(7, 1))

    def steps(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
        optimizer, penalties = torch.optim.SGD(model.parameters(), lr=0.01), []
        for batch in batches:
            x = batch.clone().requires_grad_()
            scores = model(x)
            (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            penalties.append(gradient.square().sum())
            optimizer.zero_grad()
            (nn.functional.softplus(-scores).mean() + 5 * penalties[-1]).backward()
            optimizer.step()
        return torch.stack(penalties).detach()

    batches = [images(target, generator) for _ in range(5)]
    fused, composed = both(build, target, generator)
    start = copy.deepcopy(composed.state_dict())
    assert_agree(*(steps(model, batches) for model in (fused, composed)))
    assert_parameters_agree(fused, composed)
    assert not any(torch.equal(start[name], value) for name, value in composed.named_parameters())


# ---- copies -------------------------------------------------------------------------------------------------------------------


def by_torch_save(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), by_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_of_the_module(target: Target, generator: torch.Generator, duplicate: Any, learnable: bool) -> None:
    """Equal in all that it computes and says, with memory of its own."""
    module = ScaleBiasClamp(3, -0.5, learnable=learnable, device=target.device).double().eval()
    redraw(module, generator)
    x = images(target, generator)
    y = module(x)
    copied = duplicate(module)
    assert (repr(copied), copied.training, type(copied)) == (repr(module), False, ScaleBiasClamp)
    assert_same(copied(x), y)
    assert copied.state_dict().keys() == module.state_dict().keys() == {"weight", "bias"}
    assert all(copied.state_dict()[name].data_ptr() != value.data_ptr() for name, value in module.state_dict().items())
    assert [name for name, _ in copied.named_parameters()] == (["weight", "bias"] if learnable else [])
    with torch.no_grad():
        copied.bias.add_(1)
    assert_same(module(x), y)


@pytest.mark.parametrize("learnable", [True, False])
def test_state_and_dtype_of_the_module(target: Target, generator: torch.Generator, learnable: bool) -> None:
    """Saved as plain tensors, loaded into a module that was made without memory, and moved to another dtype."""
    module = ScaleBiasClamp(3, -1.0, 1.0, learnable=learnable, dtype=torch.float64)
    redraw(module, generator)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = ScaleBiasClamp(3, -1.0, 1.0, learnable=learnable, device="meta", dtype=torch.float64)
    assert other(torch.empty(2, 3, 4, dtype=torch.float64, device="meta")).shape == (2, 3, 4)
    other.to_empty(device=target.device).reset_parameters()
    x = images(target, generator)
    assert_same(other(x), x.clamp(-1, 1))
    other.load_state_dict(torch.load(file, weights_only=True))
    values = [value.to(target.device).view(3, 1, 1) for value in module.state_dict().values()]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, *values = (value.to(dtype) for value in (x, *values))
        y = other.to(dtype)(x)
        assert y.dtype is other.weight.dtype is other.bias.dtype is dtype
        assert_close(y, COMPOSED.scale_bias_clamp(*in_float64([x, *values]), -1.0, 1.0))


def test_what_the_module_says_of_itself() -> None:
    for module, said in (
        (ScaleBiasClamp(3), "ScaleBiasClamp(3, dim=1)"),
        (ScaleBiasClamp(64, 0.0, 6.0), "ScaleBiasClamp(64, min_val=0.0, max_val=6.0, dim=1)"),
        (ScaleBiasClamp(8, max_val=1, dim=-1, learnable=False), "ScaleBiasClamp(8, max_val=1, dim=-1, learnable=False)"),
    ):
        assert repr(module) == said


@pytest.mark.parametrize(("dim", "shape"), [(1, (2, 4, 5, 5)), (1, (3,)), (-1, (3, 4)), (-2, (3,)), (0, ())])
def test_another_number_of_channels_is_refused(target: Target, dim: int, shape: tuple[int, ...]) -> None:
    said = rf"^ScaleBiasClamp: x: expected 3 elements along dim {dim}, got shape {re.escape(str(shape))}\. Pass num_features"
    with pytest.raises(OperandError, match=said):
        ScaleBiasClamp(3, 0.0, 1.0, dim=dim, device=target.device)(torch.ones(shape, device=target.device))


# ---- checkpoints and saved activations ----------------------------------------------------------------------------------------


def loss_and_gradients(model: Network, x: torch.Tensor, apply: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Run a network whose two parts with operators are applied as told."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    clamped = apply(nn.Sequential(model.convolution, model.clamp), x)
    loss = model.last(apply(model.affine, model.hidden(clamped.flatten(1)))).square().sum()
    loss.backward()  # reentrant checkpoints know of no other way
    return [loss.detach(), *(leaf.grad.clone() for leaf in (x, *model.parameters()))]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints(target: Target, generator: torch.Generator, use_reentrant: bool) -> None:
    """What is computed again in backward is bit for bit what it was."""
    fused, composed = both(Network, target, generator)
    x = images(target, generator)

    def checkpointed(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoints.checkpoint(part, x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    found = loss_and_gradients(fused, x, checkpointed)
    for one, same, right in zip(
        found, loss_and_gradients(fused, x, nn.Module.__call__), loss_and_gradients(composed, x, nn.Module.__call__), strict=True
    ):
        assert_same(one, same)
        assert_agree(one, right)


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "recomputed"])
def test_selective_checkpoints(target: Target, generator: torch.Generator, saved: bool) -> None:
    """A policy that names the operator."""
    fused, composed = both(Network, target, generator)
    x = images(target, generator)
    operator = torch.ops.cupyfused.fused_scale_bias_clamp.default
    asked = []

    def policy(context: Any, called: Any, *arguments: Any, **keywords: Any) -> checkpoints.CheckpointPolicy:
        if called is operator:
            asked.append(context.is_recompute)
        chosen = saved if called is operator else not saved
        return checkpoints.CheckpointPolicy.MUST_SAVE if chosen else checkpoints.CheckpointPolicy.PREFER_RECOMPUTE

    def selective(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)
        return checkpoints.checkpoint(part, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    for one, right in zip(
        loss_and_gradients(fused, x, selective), loss_and_gradients(composed, x, nn.Module.__call__), strict=True
    ):
        assert_agree(one, right)
    assert asked.count(False) == 2  # in forward; PyTorch 2.6 asks again in backward


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "expanded"])
def test_activations_kept_on_the_cpu(target: Target, generator: torch.Generator, layout: str) -> None:
    """What `save_on_cpu` hands back is contiguous, whatever strides the saved tensor had."""
    fused, composed = both(lambda operators: operators.module(8, -1.0, 1.0), target, generator)
    x = lay(draw(generator, (4, 8, 3, 5), torch.float64, target.device), layout).requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = fused(x)
    right = composed(x)
    for one, gradient in zip(
        torch.autograd.grad(y.square().sum(), [x, *fused.parameters()]),
        torch.autograd.grad(right.square().sum(), [x, *composed.parameters()]),
        strict=True,
    ):
        assert_agree(one, gradient)


# ---- mixed precision ----------------------------------------------------------------------------------------------------------


def conv_model(operators: Operators) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), operators.module(5, -1.0, 1.0))


def linear_model(operators: Operators) -> nn.Module:
    return nn.Sequential(nn.Linear(SIDE, 5), operators.module(5, -1.0, 1.0, dim=-1))


def test_gradient_scaler_skips_steps_that_are_not_finite(target: Target, generator: torch.Generator) -> None:
    """Inf in one channel and NaN in another: nothing moves, the scale backs off, and the next step goes."""
    x = images(target, generator)
    weights = draw(generator, (4, 5, 4, 4), torch.float64, target.device)
    broken = weights.clone()
    broken[:, 1], broken[:, 3] = torch.inf, torch.nan

    def steps(model: nn.Module) -> list[torch.Tensor]:
        model[1].load_state_dict({"weight": torch.ones(5), "bias": torch.zeros(5)})  # no channel is clamped as a whole
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(target.device, init_scale=2.0**10)
        seen = []
        for factors in (weights, broken, weights):
            optimizer.zero_grad()
            scaler.scale((model(x) * factors).sum()).backward()
            seen.append(model[1].bias.grad.clone())
            scaler.step(optimizer)
            scaler.update()
            seen += [torch.tensor(scaler.get_scale()), *(value.clone() for value in model.state_dict().values())]
        return seen

    fused, composed = (steps(model) for model in both(conv_model, target, generator))
    for one, right in zip(fused, composed, strict=True):
        assert_agree(one, right)
    first, second, third = (fused[k : k + 6] for k in (0, 6, 12))
    assert second[0].isinf().tolist() == [False, True, False, False, False]
    assert second[0].isnan().tolist() == [False, False, False, True, False]
    assert [float(step[1]) for step in (first, second, third)] == [1024, 512, 512]
    for before, now, after in zip(first[2:], second[2:], third[2:], strict=True):
        assert_same(now, before)
        assert not torch.equal(after, now)


@pytest.mark.parametrize("build", [conv_model, linear_model])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(target: Target, generator: torch.Generator, dtype: torch.dtype, build: Build) -> None:
    """16-bit activations beside float32 parameters; backward outside of the region, as PyTorch recommends it."""
    models = both(build, target, generator, torch.float32)
    x = images(target, generator, torch.float32).requires_grad_()
    results = []
    for model in models:
        # Of few bits, so that all is exact and no rounding decides on which side of a bound a value falls.
        model[1].load_state_dict({"weight": torch.arange(1, 6) / 4, "bias": torch.arange(-2, 3) / 8})
        with torch.autocast(target.device, dtype):
            assert model[0](x).dtype is dtype
            y = model(x)
        loss = (y * torch.linspace(1, 2, y.numel(), device=y.device).view(y.shape)).sum()
        results.append([y, *torch.autograd.grad(loss, [x, *model.parameters()])])
    assert results[0][0].dtype is torch.float32
    for one, right in zip(*results, strict=True):
        assert_agree(one, right)
