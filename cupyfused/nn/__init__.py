"""Modules of the operators that have parameters. Importing this imports PyTorch and registers `torch.ops.cupyfused`."""

from __future__ import annotations

from .. import _library  # noqa: F401  # exported programs and pickled graphs ask for its operators
from .fused_scale_bias_clamp import ScaleBiasClamp

__all__ = ["ScaleBiasClamp"]
