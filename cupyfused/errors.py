"""Every error that cupyfused raises, and the one place that words its skeleton."""

from __future__ import annotations

__all__ = ["CompileError", "CudaError", "CupyfusedError", "DtypeError", "OperandError"]


class CupyfusedError(Exception):
    """Base of all errors raised by cupyfused."""


class OperandError(CupyfusedError, ValueError):
    """An argument has the right type but a value, shape, device or layout that the operator cannot take."""


class DtypeError(CupyfusedError, TypeError):
    """An argument is of a type, array kind or dtype that the operator cannot take."""


class CudaError(CupyfusedError, RuntimeError):
    """CUDA is asked for and cannot be used here, or a launch failed."""


class CompileError(CupyfusedError, RuntimeError):
    """NVRTC refused a kernel; the message carries its log."""


def message(op: str, argument: str, *, expected: str, got: str, remedy: str) -> str:
    """Word an error: which operator, which argument, what was expected, what came, and what mends it.

    Examples
    --------
    >>> message("fused_scale_bias", "scale", expected="a number or an array", got="a list", remedy="Pass torch.tensor(scale).")
    'fused_scale_bias: scale: expected a number or an array, got a list. Pass torch.tensor(scale).'
    """
    return f"{op}: {argument}: expected {expected}, got {got}. {remedy}"
