"""The sample inputs of PyTorch's own OpInfos, and the calls of ours that compute the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cupyfused import fused_scale_bias, fused_scale_bias_clamp

__all__ = ["BOUND_WITH_DIMS", "COMPLEX", "NO_TENSOR", "TOO_LARGE", "VALUE", "Case", "case_of", "operator", "samples"]

# Why samples are left out: limits that the operators' docstrings name, what is not their formula, and time.
BOUND_WITH_DIMS = "a bound has dims"
COMPLEX = "an operand is complex"
NO_TENSOR = "what would be x is a number"
TOO_LARGE = "over 100,000 elements, on a CPU, not float32"
VALUE = "value= would be folded into an operand, which rounds"


@dataclass(frozen=True)
class Case:
    """A sample as a call of ours.

    Parameters
    ----------
    call
        The public function.
    inputs, options
        Its arguments.
    exact
        Whether there is one right result, bit for bit: operands of one dtype, and at most one operation that rounds.
    """

    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    options: tuple[Any, ...]
    exact: bool

    def composed(self, x: Any, scale: Any, bias: Any, *bounds: Any) -> Tensor:
        """Compute the same by PyTorch operations."""
        v: Tensor = x * scale + bias
        return torch.clamp(v, *bounds) if bounds else v


@functools.cache
def _database() -> list[Any]:
    # 5 s to import: only the tests that need it wait for it, not every collection.
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db  # type: ignore[no-any-return]


def operator(name: str) -> Any:
    """Return the OpInfo of this name."""
    (info,) = [info for info in _database() if info.name == name and not info.variant_test_name]
    return info


def samples(info: Any, device: str, dtype: torch.dtype, generator: torch.Generator) -> list[Any]:
    """Return the reference inputs of an OpInfo, the first of which are its sample inputs; none requires a gradient."""
    # Not `info.reference_inputs`: that seeds every sample alike in every run, and looks for the running test in each stack frame.
    make = info.reference_inputs_func or info.sample_inputs_func
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        return list(make(info, device, dtype, False))


# ---- the calls ------------------------------------------------------------------------------------------------------------


def case_of(name: str, sample: Any) -> Case | str:
    """Return a sample of the OpInfo `name` as a call of ours, or why there is none."""
    operands = (sample.input, *sample.args)
    if any(torch.is_complex(one) if isinstance(one, Tensor) else isinstance(one, complex) for one in operands):
        return COMPLEX
    return _FORMULAS[name](*operands, **sample.kwargs)


def _case(*inputs: Any, options: tuple[Any, ...] = (), rounds_twice: bool = False) -> Case | str:
    if not isinstance(inputs[0], Tensor):
        return NO_TENSOR
    if any(isinstance(bound, Tensor) and bound.dim() for bound in options):
        return BOUND_WITH_DIMS
    dtypes = {one.dtype for one in (*inputs, *options) if isinstance(one, Tensor)}
    exact = len(dtypes) == 1 and not (rounds_twice and inputs[0].is_floating_point())
    return Case(fused_scale_bias_clamp if options else fused_scale_bias, inputs, options, exact)


def _neutral(*operands: Any) -> tuple[Any, Any]:
    """Return the 1 and 0 that change nothing: bools beside bools, which an integer would promote."""
    dtypes = {one.dtype if isinstance(one, Tensor) else type(one) for one in operands}
    return (True, False) if dtypes <= {torch.bool, bool} else (1, 0)


def _mul(a: Any, b: Any) -> Case | str:
    x, scale = (a, b) if isinstance(a, Tensor) else (b, a)
    return _case(x, scale, _neutral(a, b)[1])


def _add(a: Any, b: Any, alpha: Any = 1) -> Case | str:
    one = _neutral(a, b)[0]
    if alpha == 1:
        return _case(a, one, b) if isinstance(a, Tensor) else _case(b, one, a)
    return _case(b, alpha, a, rounds_twice=True)


def _addcmul(a: Any, b: Any, c: Any, value: Any = 1) -> Case | str:
    if value == 1:
        return _case(b, c, a, rounds_twice=True)
    dtypes = {one.dtype for one in (a, b, c)}
    if len(dtypes) > 1 or a.is_floating_point():
        return VALUE
    return _case(b, c * value, a)  # integers wrap, so every order of the products is the same


def _clamp(a: Any, low: Any = None, high: Any = None) -> Case | str:
    return _case(a, 1, 0, options=(low, high))


def _clamp_min(a: Any, low: Any) -> Case | str:
    return _clamp(a, low)


def _clamp_max(a: Any, high: Any) -> Case | str:
    return _clamp(a, None, high)


_FORMULAS: dict[str, Callable[..., Case | str]] = {
    "mul": _mul,
    "add": _add,
    "addcmul": _addcmul,
    "clamp": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
}
