"""Python processes of their own, for what only happens once in one: a first call, an import, an environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from torch import Tensor

from cupyfused import fused_scale_bias, fused_scale_bias_clamp

__all__ = ["run_python", "sample", "start_python"]


def start_python(code: str, environment: dict[str, str | None]) -> subprocess.Popen[str]:
    """Start a process; a variable that is None is taken out of its environment."""
    merged = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment}
    variables = {name: value for name, value in merged.items() if value is not None}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run_python(code: str, **environment: str | None) -> str:
    """Run a process to its end and return what it printed; it must end well."""
    process = start_python(code, environment)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, f"exit status {process.returncode}\n{printed}\n{errors}"
    return printed


def sample(device: str) -> list[Tensor]:
    """Compute results and gradients that use packets, single elements, sums of every kind and a dtype told at run time."""
    generator = torch.Generator().manual_seed(17)
    results = []
    for dtype, shapes in (
        (torch.float32, ((64, 33, 48), (33, 1), (33, 1))),
        (torch.bfloat16, ((3_001, 256), (256,), (256,))),
        (torch.float16, ((61, 127), (61, 1), (127,))),
        (torch.float64, ((5, 7), (5, 7), ())),
    ):
        leaves = [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for shape in shapes
        ]
        y = fused_scale_bias_clamp(*leaves, -1.0, 1.0)
        results += [y, *torch.autograd.grad(y.sum(), leaves)]
        y = fused_scale_bias(leaves[0], leaves[1].double(), 0.5)
        results += [y, *torch.autograd.grad(y.square().sum(), leaves[:2])]
    return [result.detach().cpu() for result in results]
