"""Every bad input meets its error, with the words that it needs, and nothing is written; the table is in `bad_inputs`."""

from __future__ import annotations

import math
import re
import secrets
import warnings
from typing import Any

import numpy as np
import pytest

import cupyfused
from cupyfused import CupyfusedError, DtypeError

torch = pytest.importorskip("torch")

from bad_inputs import CLAMP, OPS, TABLE, Bad, Library, Numpy, Torch  # noqa: E402  (after importorskip: it imports torch)

EVERY_CALL = [
    pytest.param(bad, lib, op, id=f"{bad.name}-{lib.__name__}-{op}") for bad in TABLE for lib in bad.libraries for op in bad.ops
]


def good(lib: Library, op: str) -> dict[str, Any]:
    arguments = {"x": lib.array(2, 3), "scale": 1.5, "bias": lib.array(3)}
    return arguments | ({"min_val": 40.5, "max_val": 90.5} if op in CLAMP else {})


def bits(value: Any) -> bytes | None:
    """Return what an array holds, None for anything that has no bytes of its own."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested and not value.is_meta:
        value = value.detach().int_repr() if value.is_quantized else value.detach()
        value = value.contiguous().view(-1).view(torch.uint8).numpy()
    return value.tobytes() if isinstance(value, np.ndarray) else None


def refused(op: str, arguments: dict[str, Any], error: type[Exception] | None = None) -> str:
    """Make a bad call; return the words of its error after checking its class and that every array is as it was."""
    before = {name: bits(value) for name, value in arguments.items()}
    with pytest.raises(CupyfusedError) as raised:
        getattr(cupyfused, op)(**arguments)
    assert isinstance(raised.value, error or (ValueError, TypeError)), repr(raised.value)
    assert {name: bits(value) for name, value in arguments.items()} == before, "something was written to"
    return str(raised.value)


@pytest.mark.parametrize(("bad", "lib", "op"), EVERY_CALL)
def test_bad_input_meets_its_error_and_nothing_is_written(bad: Bad, lib: Library, op: str) -> None:
    arguments = good(lib, op) | bad.make(lib)
    words = refused(op, arguments, bad.error)
    assert re.fullmatch(bad.pattern(lib, op), words), words
    if "out" not in arguments and bad.argument != "x":
        refused(op, arguments | {"out": np.ones_like(arguments["x"]) if lib is Numpy else torch.ones_like(arguments["x"])})


@pytest.mark.parametrize("lib", [Numpy, Torch])
@pytest.mark.parametrize("op", OPS)
def test_the_call_that_the_table_departs_from_is_good(lib: Library, op: str) -> None:
    """Else every row might be refused for something that is wrong with all of them."""
    arguments, out = good(lib, op), lib.array(2, 3)
    assert getattr(cupyfused, op)(**arguments, out=out) is out
    composed = arguments["x"] * arguments["scale"] + arguments["bias"]
    assert bits(out) == bits(composed.clip(40.5, 90.5) if op in CLAMP else composed)


# ---- what looks bad and is not ------------------------------------------------------------------------------------------

NUMBERS = [np.array(2.5), np.float64(2.5), np.float32(2.5), np.int16(2), np.bool_(True), np.array(2), 2, True, 2.5]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__} {number}")
@pytest.mark.parametrize("lib", [Numpy, Torch])
def test_numpy_values_without_dims_count_as_numbers(lib: Library, number: Any) -> None:
    x, plain = lib.array(2, 3), number.item() if isinstance(number, (np.generic, np.ndarray)) else number
    pairs = [[cupyfused.fused_scale_bias(x, *given) for given in ((one, 1.5), (1.5, one))] for one in (number, plain)]
    pairs[0] += [cupyfused.fused_scale_bias_clamp(x, 1.5, 1.5, number, None)]
    pairs[1] += [cupyfused.fused_scale_bias_clamp(x, 1.5, 1.5, plain, None)]
    for found, expected in zip(*pairs):
        assert bits(found) == bits(expected)
        assert found.dtype == expected.dtype


@pytest.mark.parametrize("lib", [Numpy, Torch])
def test_a_zero_dim_array_takes_a_zero_dim_out(lib: Library) -> None:
    x, out = lib.array(), lib.array()
    assert cupyfused.fused_scale_bias(x, 2.5, 1.5, out=out) is out
    assert math.isclose(float(out), float(x) * 2.5 + 1.5, rel_tol=1e-5)


def test_a_numpy_matrix_is_taken_element_by_element() -> None:
    values = Numpy.array(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrix = np.matrix(values)
        found = np.asarray(cupyfused.fused_scale_bias(matrix, matrix, 1.5))
    np.testing.assert_array_equal(found, values * values + np.float32(1.5))


@pytest.mark.parametrize("impl", ["auto", "host"])
def test_numpy_strides_that_are_no_whole_elements_are_walked_right_or_refused(impl: str) -> None:
    """A field of records lies 5 bytes from the next."""
    records = np.ones(4, dtype=[("flag", "u1"), ("value", "f4")])
    records["value"] = Numpy.array(4)
    before, out = records.copy(), records.copy()
    expected = records["value"] * np.float32(2) + np.float32(1.5)
    try:
        found = cupyfused.fused_scale_bias(records["value"], 2, 1.5, impl=impl)
        cupyfused.fused_scale_bias(records["value"], 2, 1.5, impl=impl, out=out["value"])
    except CupyfusedError:
        assert out.tobytes() == before.tobytes()
    else:
        assert found.tolist() == out["value"].tolist() == expected.tolist()
    assert records.tobytes() == before.tobytes()


class Locked:
    """A producer of DLPack that refuses to export itself."""

    def __init__(self) -> None:
        self.words = secrets.token_hex(4)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> None:
        raise BufferError(self.words)


@pytest.mark.parametrize("op", OPS)
def test_a_producer_that_refuses_is_quoted(op: str) -> None:
    arguments = good(Numpy, op) | {"x": Locked()}
    expected = rf"{op}: x: expected an array that exports itself through DLPack, got .*Locked.*{arguments['x'].words}"
    assert re.match(expected, refused(op, arguments, DtypeError))
