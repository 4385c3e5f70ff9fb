"""Fused GPU array operators for Python: one kernel forward, one kernel backward, compiled at run time with nothing but pip.

Importing this package compiles nothing, touches no GPU, and imports neither PyTorch nor CuPy.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import _array_call  # noqa: F401  # what ops call
from ._config import show_config
from ._settings import set_compile_mode
from ._warmup import warmup
from .errors import CompileError, CudaError, CupyfusedError, DtypeError, OperandError
from .ops.fused_scale_bias import fused_scale_bias
from .ops.fused_scale_bias_clamp import fused_scale_bias_clamp

if TYPE_CHECKING:
    import torch

    FusedScaleBias: type[torch.autograd.Function]
    FusedScaleBiasClamp: type[torch.autograd.Function]

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "CudaError",
    "CupyfusedError",
    "DtypeError",
    "FusedScaleBias",
    "FusedScaleBiasClamp",
    "OperandError",
    "fused_scale_bias",
    "fused_scale_bias_clamp",
    "set_compile_mode",
    "show_config",
    "warmup",
]


# Its operators are there for torch.ops, torch.export.load and pickled graphs without a first call.
if sys.modules.get("torch") is not None:
    importlib.import_module("._library", __name__)


def __getattr__(name: str) -> Any:
    """Make the `autograd.Function` of an op when it is asked for: that imports PyTorch."""
    for public in __all__:
        if name != public and name == "".join(part.capitalize() for part in public.split("_")):
            op = importlib.import_module(f".ops.{public}", __name__).OP
            return importlib.import_module("._autograd", __name__).function(op)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
