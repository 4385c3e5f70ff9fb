"""Promotion and the fitting of numbers, against PyTorch, over every dtype, rank and pair or triple of them."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
import pytest

import cupyfused
from cupyfused._dtypes import BY_NAME, DTYPES, Dtype, Rank, Typed, fit_number, number_dtype, promote, result_type

torch = pytest.importorskip("torch")

NAMES = list(BY_NAME)
INTEGERS = [name for name in NAMES if BY_NAME[name].category == 1]
FLOATS = [name for name in NAMES if BY_NAME[name].is_floating]
NUMBERS = (True, 3, 2.5)  # what a Python number can count as: bool, int64, the default floating dtype


def tensor(name: str, shape: Sequence[int] = (2,)) -> torch.Tensor:
    return torch.ones(tuple(shape), dtype=getattr(torch, name))


def spelled(typed: Typed) -> Any:
    """Return an operand that PyTorch sees as `typed`."""
    if typed.rank is Rank.NUMBER:
        return next(number for number in NUMBERS if number_dtype(number) is typed.dtype)
    return tensor(typed.dtype.name, (2,) if typed.rank is Rank.ARRAY else ())


def named(dtype: torch.dtype) -> Dtype:
    return BY_NAME[str(dtype).removeprefix("torch.")]


ARRAYS = [Typed(dtype, Rank.ARRAY) for dtype in DTYPES]
ZERO_DIMS = [Typed(dtype, Rank.ZERO_DIM) for dtype in DTYPES]
ALL = [*ARRAYS, *ZERO_DIMS, *(Typed(number_dtype(number), Rank.NUMBER) for number in NUMBERS)]


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_a_dtype_is_what_torch_and_numpy_know_by_its_name(dtype: Dtype) -> None:
    own = getattr(torch, dtype.name)
    assert dtype.size == own.itemsize
    assert dtype.is_floating == own.is_floating_point
    assert dtype.category == (2 if own.is_floating_point else int(own is not torch.bool))
    if dtype.name != "bfloat16":
        assert np.dtype(dtype.name).itemsize == dtype.size


def test_codes_are_the_places_in_the_kernels_enum() -> None:
    text = resources.files("cupyfused.cuda_src").joinpath("common.cuh").read_text(encoding="ascii")
    (listed,) = re.findall(r"enum Dtype[^{]*\{([^}]*)\}", text)
    assert [name.strip().lower() for name in listed.split(",")] == NAMES
    assert [dtype.code for dtype in DTYPES] == list(range(len(NAMES)))


@pytest.mark.parametrize(("a", "b"), list(itertools.product(NAMES, repeat=2)))
def test_promote_is_torch_promote_types(a: str, b: str) -> None:
    assert promote(BY_NAME[a], BY_NAME[b]) is named(torch.promote_types(getattr(torch, a), getattr(torch, b)))


@pytest.mark.parametrize("a", ALL, ids=lambda one: f"{one.dtype.name}-{one.rank.name}")
def test_result_type_is_torch_result_type(a: Typed) -> None:
    for b in ALL:
        found = result_type(a, b)
        assert found.dtype is named(torch.result_type(spelled(a), spelled(b))), (a, b)
        assert found.rank is max(a.rank, b.rank), (a, b)


@pytest.mark.parametrize("default", ["float16", "bfloat16", "float32", "float64"])
def test_a_float_counts_as_the_default_dtype(default: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, default))
    try:
        for own in (*ARRAYS, *ZERO_DIMS):
            found = result_type(own, Typed(number_dtype(2.5, BY_NAME[default]), Rank.NUMBER))
            assert found.dtype is named(torch.result_type(spelled(own), 2.5)), own
            composed = spelled(own) * 2.5 + True
            assert cupyfused.fused_scale_bias(spelled(own), 2.5, True).dtype == composed.dtype, own
    finally:
        torch.set_default_dtype(before)


# ---- the fold over the operands of a call -------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [*ARRAYS, *ZERO_DIMS], ids=lambda one: f"{one.dtype.name}-{one.rank.name}")
def test_the_fold_is_the_dtype_of_the_composed_expression(x: Typed) -> None:
    for scale in ALL:
        scaled = spelled(x) * spelled(scale)
        for bias in ALL:
            composed = scaled + spelled(bias)
            folded = functools.reduce(result_type, (x, scale, bias))
            assert folded.dtype is named(composed.dtype), (x, scale, bias)


@pytest.mark.parametrize("own", [*ARRAYS, *ZERO_DIMS], ids=lambda one: f"{one.dtype.name}-{one.rank.name}")
def test_bounds_promote_as_in_torch_clamp(own: Typed) -> None:
    """Both bounds of one clamp promote together before they meet the value: uint8 between float16 and float64 is float64."""
    numbers = [one for one in ALL if one.rank is Rank.NUMBER]
    bounds = [(low,) for low in numbers + ZERO_DIMS]
    bounds += [*itertools.product(numbers, repeat=2), *itertools.product(ZERO_DIMS, repeat=2)]
    for given in bounds:
        composed = torch.result_type(spelled(own), spelled(functools.reduce(result_type, given)))
        if composed is torch.bool:
            continue  # torch.clamp has no bool
        assert torch.clamp(spelled(own), *map(spelled, given)).dtype == composed
        found = cupyfused.fused_scale_bias_clamp(spelled(own), True, False, *map(spelled, given))
        assert found.dtype == composed, f"{own} between {given}"


@pytest.mark.parametrize("x", NAMES)
@pytest.mark.parametrize("scale", NAMES)
def test_calls_return_the_dtype_of_the_composed_expression(x: str, scale: str) -> None:
    rank = random.choice([(2,), ()])
    for bias in NAMES:
        given = tensor(x), tensor(scale, rank), tensor(bias, random.choice([(2,), ()]))
        composed = given[0] * given[1] + given[2]
        assert cupyfused.fused_scale_bias(*given).dtype == composed.dtype, given
        if composed.dtype is not torch.bool:
            for bounds in ((1, None), (0.5, None), (None, torch.tensor(1.5)), (torch.tensor(1), torch.tensor(2))):
                found = cupyfused.fused_scale_bias_clamp(*given, *bounds)
                assert found.dtype == composed.clamp(*bounds).dtype, (given, bounds)


@pytest.mark.parametrize(("x", "scale"), [pair for pair in itertools.product(NAMES, repeat=2) if "bfloat16" not in pair])
def test_numpy_arrays_promote_as_torch_does(x: str, scale: str) -> None:
    for bias in (np.ones(2, dtype="int16"), np.ones(2, dtype="float16"), True, 3, 2.5, np.float32(2.5)):
        beside = torch.from_numpy(bias) if isinstance(bias, np.ndarray) else bias if isinstance(bias, int) else float(bias)
        composed = tensor(x) * tensor(scale) + beside
        found = cupyfused.fused_scale_bias(np.ones(2, dtype=x), np.ones(2, dtype=scale), bias)
        assert found.dtype.name == named(composed.dtype).name, bias


# ---- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_as_torch_wraps_them(name: str) -> None:
    bits = 8 * BY_NAME[name].size
    edges = [sign * (1 << power) + more for power in (bits - 1, bits, bits + 1, 31, 62) for sign in (-1, 1) for more in (-1, 0, 1)]
    numbers = [*edges, *range(-300, 300), *(random.randrange(-(1 << 63), 1 << 63) for _ in range(200)), -(1 << 63), (1 << 63) - 1]
    for number in numbers:
        if -(1 << 63) <= number < 1 << 63:
            assert fit_number(number, BY_NAME[name]) == (tensor(name) * number)[0].item(), number


def test_bool_stands_as_one() -> None:
    assert fit_number(True, BY_NAME["bool"]) == 1
    assert fit_number(True, BY_NAME["float32"]) == 1.0


# The largest float32, and the number halfway to where the next would be: what is nearer to the largest rounds to it.
LARGEST = torch.finfo(torch.float32).max
HALFWAY = LARGEST + 2.0**103
AROUND = [LARGEST, math.nextafter(LARGEST, math.inf), math.nextafter(HALFWAY, 0), HALFWAY, math.nextafter(HALFWAY, math.inf)]
WIDE = [1e-300, 1e-45, 2.5, 65504.0, 65520.0, 1e38, *AROUND, 1e39, 1e300, math.inf, 3, 1 << 62, (1 << 53) + 1]


@pytest.mark.parametrize("number", [sign * number for number in WIDE for sign in (1, -1)])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_overflow_where_torch_overflows(name: str, number: float) -> None:
    compute = "float64" if name == "float64" else "float32"
    composed = tensor(compute) * number
    assert (tensor(compute) * fit_number(number, BY_NAME[name])).tolist() == composed.tolist()
    if name == compute:
        assert cupyfused.fused_scale_bias(tensor(name), number, 2.5).tolist() == (composed + 2.5).tolist()


@pytest.mark.parametrize("name", FLOATS)
def test_integers_that_no_float_holds_overflow(name: str) -> None:
    assert fit_number(10**400, BY_NAME[name]) == math.inf
    assert fit_number(-(10**400), BY_NAME[name]) == -math.inf


@pytest.mark.parametrize("name", FLOATS)
def test_nan_stays(name: str) -> None:
    assert math.isnan(fit_number(math.nan, BY_NAME[name]))
