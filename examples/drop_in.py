"""Replace one line of a PyTorch model, and see that training is the same.

    python examples/drop_in.py

A classifier of small images modulates its features per channel and clamps them. It is trained twice from the same weights: with the
three composed operations, and with the fused operator in their place. Runs on the GPU where there is one, else on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from cupyfused import fused_scale_bias_clamp

STEPS = 20


def composed(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return x.mul(scale).add(bias).clamp(0.0, 6.0)


def fused(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return fused_scale_bias_clamp(x, scale, bias, 0.0, 6.0)


class Classifier(nn.Module):
    """A convolution, a modulation per channel, a linear layer."""

    def __init__(self, fused_line: bool) -> None:
        super().__init__()
        self.modulate = fused if fused_line else composed
        self.convolution = nn.Conv2d(3, 32, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(32, 1, 1))
        self.bias = nn.Parameter(torch.zeros(32, 1, 1))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.modulate(self.convolution(images), self.scale, self.bias)
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


def train(model: Classifier, images: Tensor, labels: Tensor) -> list[float]:
    """Return the loss of each step."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device)
    first = Classifier(fused_line=False).to(device)
    second = Classifier(fused_line=True).to(device)
    second.load_state_dict(first.state_dict())
    losses = train(first, images, labels), train(second, images, labels)
    for step in range(0, STEPS, 5):
        print(f"step {step:2d}  composed {losses[0][step]:.6f}  fused {losses[1][step]:.6f}")
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)
    print(f"the same on {device}: {losses[0][-1]:.4f} after {STEPS} steps")


if __name__ == "__main__":
    main()
