"""PyTorch's own OpInfo samples of mul, add, addcmul and clamp, as an outside suite for the operators that contain them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from checks import FLOATS, INTEGERS, assert_close, assert_same, in_float64
from opinfo_samples import BOUND_WITH_DIMS, COMPLEX, NO_TENSOR, TOO_LARGE, VALUE, Case, case_of, operator, samples
from targets import Target
from torch import Tensor

# PyTorch's module of samples says so of itself, with a NumPy that is newer than it.
pytestmark = pytest.mark.filterwarnings("ignore:The 'generic' unit for NumPy timedelta")

# For each OpInfo: the reasons for which samples are left out, all of which are seen, and the fewest samples that ran of any dtype
# on a CPU (PyTorch 2.6, 2.13 and 2.14 alike).
OPINFOS: dict[str, tuple[set[str], int]] = {
    "mul": ({NO_TENSOR}, 101),
    "add": ({NO_TENSOR}, 105),
    "addcmul": ({COMPLEX, VALUE}, 29),
    "clamp": ({BOUND_WITH_DIMS}, 2),
    "clamp_min": ({BOUND_WITH_DIMS}, 20),
    "clamp_max": ({BOUND_WITH_DIMS}, 20),
}
BINARY = ("mul", "add")  # these take bool too, and have samples of a million elements
CASES = [
    (name, dtype) for name in OPINFOS for dtype in (torch.bool, *INTEGERS, *FLOATS) if name in BINARY or dtype is not torch.bool
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_samples_of_opinfo(target: Target, generator: torch.Generator, name: str, dtype: torch.dtype) -> None:
    info = operator(name)
    assert dtype in info.supported_dtypes(target.device)
    reasons, at_least = OPINFOS[name]
    only_small = target.device == "cpu" and dtype is not torch.float32 and name in BINARY
    if only_small:
        reasons = reasons | {TOO_LARGE}
    ran, left_out = 0, Counter[str]()
    for sample in samples(info, target.device, dtype, generator):
        case = case_of(name, sample)
        if only_small and isinstance(case, Case) and most_elements(case.inputs) > 100_000:
            case = TOO_LARGE
        if isinstance(case, str):
            left_out[case] += 1
            continue
        try:
            check_values(target, case, info, sample)
            check_gradients(target, case, generator)
        except Exception:
            print(sample.summary())
            raise
        ran += 1
    counts = ", ".join(f"{count} left out: {reason}" for reason, count in left_out.items())
    print(f"{name:9} {str(dtype)[6:]:8} {target.impl:9} {ran:3} ran, {counts}")
    assert set(left_out) == reasons
    assert ran >= at_least


def most_elements(inputs: Any) -> int:
    return max(value.numel() for value in inputs if isinstance(value, Tensor))


def check_values(target: Target, case: Case, info: Any, sample: Any) -> None:
    """Compare with the composed expression, and with the operation that the sample was made for."""
    y = target.run(case.call, *case.inputs, *case.options)
    composed = case.composed(*case.inputs, *case.options)
    operation = info(sample.input, *sample.args, **sample.kwargs)
    assert (y.dtype, y.shape, y.device, y.stride()) == (composed.dtype, composed.shape, composed.device, composed.stride())
    assert (y.dtype, y.shape) == (operation.dtype, operation.shape)
    if case.exact:
        assert_same(y, composed)
        assert_same(y, operation)
        return
    x, scale, bias = map(largest, case.inputs)
    wide = sample.transform(lambda value: value.double() if isinstance(value, Tensor) else value)
    for exact in (case.composed(*in_float64(case.inputs), *in_float64(case.options)), info(wide.input, *wide.args, **wide.kwargs)):
        assert_near(y, exact, max(x * scale, bias))


def check_gradients(target: Target, case: Case, generator: torch.Generator) -> None:
    """Compare the gradients of all floating inputs with those of the composed expression in float64."""
    asked = [isinstance(value, Tensor) and value.is_floating_point() for value in case.inputs]
    if not any(asked):
        return
    leaves = [value.detach().requires_grad_() if one else value for value, one in zip(case.inputs, asked)]
    wide = [value.requires_grad_(one) if isinstance(value, Tensor) else value for value, one in zip(in_float64(case.inputs), asked)]
    y = target.run(case.call, *leaves, *case.options)
    # At most 1: its product with the largest float16 of the samples is then finite there too, as it is in float64.
    grad_out = (torch.rand(y.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(y.device, y.dtype)
    inputs = [leaf for leaf, one in zip(leaves, asked) if one]
    found = torch.autograd.grad(y, inputs, grad_out)
    exact_y = case.composed(*wide, *in_float64(case.options))
    expected = torch.autograd.grad(exact_y, [leaf for leaf, one in zip(wide, asked) if one], grad_out.double())
    size = max(map(largest, case.inputs[:2]))
    for gradient, leaf, right in zip(found, inputs, expected):
        assert (gradient.dtype, gradient.shape, gradient.device) == (leaf.dtype, leaf.shape, leaf.device)
        arithmetic = torch.float64 if y.dtype is torch.float64 else torch.float32
        assert_near(gradient, right, size, arithmetic, added=y.numel() / max(leaf.numel(), 1))


def largest(value: Any) -> float:
    """Return the largest finite magnitude in an operand, 1 if it is less."""
    magnitudes = torch.as_tensor(value, dtype=torch.float64).abs()
    finite = magnitudes[magnitudes.isfinite()]
    return max(1.0, float(finite.max())) if finite.numel() else 1.0


def assert_near(actual: Tensor, exact: Tensor, size: float, computed_in: Any = None, added: float = 1) -> None:
    """Compare with a float64 result by the one table of tolerances, after a power of two has brought terms to order one."""
    step = 2.0 ** math.ceil(math.log2(size))
    assert_close((actual.detach().double() / step).to(actual.dtype), exact.detach() / step, computed_in, added)
