"""The module of fused_scale_bias_clamp."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import OperandError, message
from ..ops.fused_scale_bias_clamp import fused_scale_bias_clamp

__all__ = ["ScaleBiasClamp"]


class ScaleBiasClamp(nn.Module):
    r"""Scale, shift and clamp each channel: one kernel forward, one backward.

    .. math:: y = \min(\max(x \cdot weight_c + bias_c,\ min\_val),\ max\_val)

    Parameters
    ----------
    num_features : int
        How many channels x has along `dim`.
    min_val, max_val : float, optional
        The bounds; None leaves that side open.
    dim : int
        The channel dim of x: 1 for images in NCHW or channels_last, -1 for features last.
    learnable : bool
        Whether `weight` and `bias` are parameters; if not they are buffers, which move and are saved with the module all the same.
    device, dtype
        Of `weight` and `bias`, as in `torch.nn`.

    Attributes
    ----------
    weight, bias : Tensor of shape (num_features,)
        Set to 1 and 0 by `reset_parameters`.

    Notes
    -----
    Values, dtypes, strides and gradients are those of `fused_scale_bias_clamp`.

    Examples
    --------
    >>> import torch
    >>> from cupyfused.nn import ScaleBiasClamp
    >>> module = ScaleBiasClamp(3, min_val=0.0, max_val=6.0)
    >>> module
    ScaleBiasClamp(3, min_val=0.0, max_val=6.0, dim=1)
    >>> module(torch.randn(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    def __init__(
        self,
        num_features: int,
        min_val: float | None = None,
        max_val: float | None = None,
        *,
        dim: int = 1,
        learnable: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_features, self.min_val, self.max_val, self.dim, self.learnable = num_features, min_val, max_val, dim, learnable
        for name in ("weight", "bias"):
            values = torch.empty(num_features, device=device, dtype=dtype)
            if learnable:
                self.register_parameter(name, nn.Parameter(values))
            else:
                self.register_buffer(name, values)
        self.reset_parameters()

    weight: Tensor
    bias: Tensor

    def reset_parameters(self) -> None:
        """Make the module do nothing but clamp: weight 1, bias 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module; x has `num_features` elements along `dim`."""
        dim = self.dim + x.dim() if self.dim < 0 else self.dim
        if not 0 <= dim < x.dim() or x.shape[dim] != self.num_features:
            expected = f"{self.num_features} elements along dim {self.dim}"
            remedy = "Pass num_features and dim as x has them."
            raise OperandError(message("ScaleBiasClamp", "x", expected=expected, got=f"shape {tuple(x.shape)}", remedy=remedy))
        shape = (self.num_features,) + (1,) * (x.dim() - 1 - dim)
        return fused_scale_bias_clamp(x, self.weight.view(shape), self.bias.view(shape), self.min_val, self.max_val)

    def extra_repr(self) -> str:
        """Show what the module was made with, defaults left out."""
        parts = [f"{self.num_features}"]
        parts += [f"{name}={value}" for name, value in (("min_val", self.min_val), ("max_val", self.max_val)) if value is not None]
        parts.append(f"dim={self.dim}")
        if not self.learnable:
            parts.append("learnable=False")
        return ", ".join(parts)
