"""Settings of a process."""

from __future__ import annotations

import os
from typing import Literal, get_args

from .errors import OperandError, message

__all__ = ["CompileMode", "set_compile_mode"]

CompileMode = Literal["decompose", "opaque"]


def set_compile_mode(mode: CompileMode) -> None:
    """Choose what stands for an op in a graph of `torch.compile` or `torch.export`.

    Parameters
    ----------
    mode : {"decompose", "opaque"}
        "decompose", the default: PyTorch's own operations, which Inductor fuses with their neighbours, and which an exported
        program or an ONNX file holds; no kernel of ours runs. "opaque": one registered operator, our kernels. The environment
        variable `CUPYFUSED_COMPILE_MODE` sets what a process starts with.

    Notes
    -----
    Compiled functions notice a change and compile again. `impl="cuda"` in a call asks for the kernel in either mode,
    `impl="reference"` for PyTorch's operations.

    Examples
    --------
    >>> set_compile_mode("opaque")
    >>> set_compile_mode("decompose")
    """
    global compile_mode
    compile_mode = checked(mode)


def checked(mode: str) -> str:
    """Refuse a mode that does not exist."""
    modes = get_args(CompileMode)
    if mode not in modes:
        remedy = "Pass one of them."
        raise OperandError(message("set_compile_mode", "mode", expected=" or ".join(modes), got=repr(mode), remedy=remedy))
    return mode


compile_mode = checked(os.environ.get("CUPYFUSED_COMPILE_MODE", "decompose"))
