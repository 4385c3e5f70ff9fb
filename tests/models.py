"""A network that uses everything the package offers, and the same network written with PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cupyfused import fused_scale_bias, fused_scale_bias_clamp
from cupyfused.nn import ScaleBiasClamp

__all__ = ["COMPOSED", "FUSED", "ROUNDED_ONCE", "Composed", "Network", "Operators", "redraw", "train"]

CHANNELS, FEATURES, SIDE = 5, 7, 6


def composed_scale_bias(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return x * scale + bias


def composed_scale_bias_clamp(x: Tensor, scale: Tensor, bias: Any, min_val: float, max_val: float) -> Tensor:
    return torch.clamp(x * scale + bias, min_val, max_val)


def rounded_once(function: Callable[..., Tensor], *values: Any) -> Tensor:
    """16-bit floats computed in float32 and rounded at the end, which is what the operators promise."""
    return function(*[value.float() if isinstance(value, Tensor) else value for value in values]).to(values[0].dtype)


def rounded_scale_bias(*values: Any) -> Tensor:
    return rounded_once(composed_scale_bias, *values)


def rounded_scale_bias_clamp(*values: Any) -> Tensor:
    return rounded_once(composed_scale_bias_clamp, *values)


class Composed(nn.Module):
    """`ScaleBiasClamp` as one would write it without this package."""

    compute: Callable[..., Tensor] = staticmethod(composed_scale_bias_clamp)

    def __init__(self, num_features: int, min_val: float, max_val: float, *, dim: int = 1):
        super().__init__()
        self.bounds, self.dim = (min_val, max_val), dim
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[self.dim] = -1
        return self.compute(x, self.weight.view(shape), self.bias.view(shape), *self.bounds)


class RoundedOnce(Composed):
    """The same with 16-bit floats rounded once."""

    compute = staticmethod(rounded_scale_bias_clamp)


class Operators(NamedTuple):
    """One way to compute what a network takes from the package: its module and its two functions."""

    module: Callable[..., nn.Module]
    scale_bias: Callable[..., Tensor]
    scale_bias_clamp: Callable[..., Tensor]


FUSED = Operators(ScaleBiasClamp, fused_scale_bias, fused_scale_bias_clamp)
COMPOSED = Operators(Composed, composed_scale_bias, composed_scale_bias_clamp)
ROUNDED_ONCE = Operators(RoundedOnce, rounded_scale_bias, rounded_scale_bias_clamp)


class Affine(nn.Module):
    """Both functions in a row, called directly, with a parameter that both read."""

    def __init__(self, operators: Operators):
        super().__init__()
        self.operators = operators
        self.scale, self.bias = nn.Parameter(torch.ones(FEATURES)), nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        y = self.operators.scale_bias(x, self.scale, self.bias)
        return self.operators.scale_bias_clamp(y, self.scale, 0.25, -2.0, 2.0)


class Network(nn.Module):
    """Images of 3 channels to two numbers each: a convolution, the module, a linear layer, both functions, a linear layer."""

    def __init__(self, operators: Operators):
        super().__init__()
        self.convolution = nn.Conv2d(3, CHANNELS, 3)
        self.clamp = operators.module(CHANNELS, -1.0, 1.0)
        self.hidden = nn.Linear(CHANNELS * (SIDE - 2) ** 2, FEATURES)
        self.affine = Affine(operators)
        self.last = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        clamped = self.clamp(self.convolution(x))
        return self.last(self.affine(self.hidden(clamped.flatten(1))))  # type: ignore[no-any-return]


def redraw(module: nn.Module, generator: torch.Generator) -> None:
    """Fill all parameters and buffers at random, so that results are of order one and a good part of them reach a bound."""
    for value in module.state_dict().values():
        inputs = value[0].numel() if value.dim() > 1 else 1
        value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) / inputs**0.5)


def train(model: nn.Module, x: Tensor, right: Tensor, steps: int) -> Tensor:
    """Take steps of gradient descent and return the loss before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - right).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)
