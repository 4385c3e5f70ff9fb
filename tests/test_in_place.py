"""The composed expression in place: the same values, fewer arrays, and nothing written over that is still read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

import cupyfused
from cupyfused._in_place import Composed

Expression = Callable[..., Any]

# Each takes the namespace and three values, of which any may be the largest or a number.
EXPRESSIONS: dict[str, Expression] = {
    "scale and bias": lambda namespace, x, y, z: x * y + z,
    "the intermediate on the right": lambda namespace, x, y, z: z + x * y,
    "the intermediate on the right, in order": lambda namespace, x, y, z: z - x * y,
    "clip": lambda namespace, x, y, z: namespace.clip(x - z, -0.5, 0.5) * y,
    "read twice": lambda namespace, x, y, z: (lambda v: v * namespace.tanh(v) + v)(x * y + z),
    "squared": lambda namespace, x, y, z: (lambda v: v * v)(x * y) + z,
    "compared": lambda namespace, x, y, z: namespace.where(x * y > z, x * y, z),
    "reflected": lambda namespace, x, y, z: 1 / (2 + abs(1 - x * y)) ** 2 - z,
    "of one number": lambda namespace, x, y, z: -(x + 1),
    "an operand given back": lambda namespace, x, y, z: namespace.positive(x) * y - z,
    "a step for nothing": lambda namespace, x, y, z: (lambda v: (v + z, v)[1])(x * y),
    "an intermediate given back": lambda namespace, x, y, z: (lambda v: namespace.positive(v) * (v + z))(x * y),
    "a view of an intermediate": lambda namespace, x, y, z: (lambda v: namespace.real(v) * (v + z))(x * y),
    "constants": lambda namespace, x, y, z: namespace.clip(x * namespace.pi + y, 0, namespace.inf) - z,
    "arrays in a list": lambda namespace, x, y, z: namespace.stack([x * x, x + x])[0] + z,
    "a keyword": lambda namespace, x, y, z: namespace.sum(x * y + z, axis=0),
    "no step": lambda namespace, x, y, z: x,
    "a look at a value": lambda namespace, x, y, z: x * y + z if bool((x == x).all()) else z,
}


def times(values: list[Any], factor: int, namespace: Any) -> list[Any]:
    """Return new values that lie as these do: numbers, and arrays of the namespace."""
    arrays = [one * factor if isinstance(one, float) else np.asarray(one * one.dtype.type(factor)) for one in values]
    return [torch.from_numpy(one) if namespace is torch and isinstance(one, np.ndarray) else one for one in arrays]


def as_numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


@st.composite
def operands(draw: st.DrawFn) -> list[Any]:
    """Draw shapes and dtypes of three values; the first is an array."""
    seed, values = np.random.default_rng(draw(st.integers(0, 2**32))), []
    for k in range(3):
        shape = draw(st.sampled_from([(4, 5), (4, 5), (5,), (4, 1), (1, 5), (), None][: 7 if k else 6]))
        dtype = draw(st.sampled_from(["float32", "float32", "float64"]))
        value = seed.standard_normal(shape or ()).astype(dtype)
        values.append(float(value) if shape is None else np.asarray(value))
    if draw(st.booleans()) and np.ndim(values[0]) == 2:
        values[0] = np.asfortranarray(values[0])
    return values


@pytest.mark.parametrize("namespace", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", EXPRESSIONS)
@given(values=operands())
def test_values_are_those_of_the_expression(name: str, namespace: Any, values: list[Any]) -> None:
    """Bit for bit, in the same layout, at the first call, the one that learns and later ones; no operand is written to."""
    expression, composed = EXPRESSIONS[name], Composed(EXPRESSIONS[name], namespace)
    for factor in (1, -1, 2, 3):
        arrays, untouched = times(values, factor, namespace), times(values, factor, namespace)
        y, expected = composed.compute(*arrays), expression(namespace, *untouched)
        assert type(y) is type(expected)
        for one, right in zip([y, *arrays], [expected, *untouched]):
            np.testing.assert_array_equal(as_numpy(one), as_numpy(right), strict=True)
            assert as_numpy(one).strides == as_numpy(right).strides


class Written(TorchDispatchMode):
    """Counts the arrays that operations allocate: those of a result whose memory no operand has."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [one.data_ptr() for one in (*args, *(kwargs or {}).values()) if isinstance(one, torch.Tensor)]
        self.allocated += result.data_ptr() not in given
        return result


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("scale and bias", 1),
        ("the intermediate on the right", 1),
        ("the intermediate on the right, in order", 2),
        ("clip", 1),
        ("read twice", 2),
        ("squared", 1),
        ("of one number", 2),
    ],
)
def test_how_many_arrays_pytorch_allocates(name: str, arrays: int) -> None:
    values = [torch.randn(64, 3) for _ in range(3)]
    composed = Composed(EXPRESSIONS[name], torch)
    for _ in range(2):  # the second learns
        composed.compute(*values)
    with Written() as written:
        composed.compute(*values)
    assert written.allocated == arrays


def test_a_call_with_numpy_arrays_allocates_its_result_alone() -> None:
    x, scale, bias = (np.random.default_rng(k).standard_normal(2**18).astype(np.float32) for k in range(3))
    for _ in range(3):  # the second learns
        tracemalloc.start()
        y = cupyfused.fused_scale_bias_clamp(x, scale, bias, -1, 1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    np.testing.assert_array_equal(y, np.clip(x * scale + bias, np.float32(-1), np.float32(1)))
    assert y.nbytes <= peak < 1.1 * y.nbytes


def test_what_autograd_records_is_not_written_over() -> None:
    x, scale, bias = (torch.randn(64, requires_grad=True) for _ in range(3))
    for _ in range(4):  # the second call without a graph learns, and later ones run what was learned
        y = cupyfused.fused_scale_bias_clamp(x, scale, bias, -1, 1)
        with torch.no_grad():
            again = cupyfused.fused_scale_bias_clamp(x, scale, bias, -1, 1)
        torch.testing.assert_close(again, y, rtol=0, atol=0)
        (grad,) = torch.autograd.grad(y, scale, torch.ones_like(y))
        torch.testing.assert_close(grad, x * (y.abs() < 1), rtol=0, atol=0)
