"""Reading DLPack capsules of PyTorch and NumPy: what they say, and that looking into one neither consumes nor leaks it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyfused import _dlpack
from cupyfused._dtypes import BY_NAME

torch = pytest.importorskip("torch")

NAMES = list(BY_NAME)
UNSTORED = ["uint16", "uint32", "uint64", "complex64", "complex128"]


def rows(name: str) -> torch.Tensor:
    """A dense 6 x 10 tensor of random values."""
    dtype = getattr(torch, name)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(6, 10, dtype=torch.float64).to(dtype)
    return torch.randint(1, 100, (6, 10)).to(dtype)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda a: a,
    "offset": lambda a: a[1:, 3:],
    "steps": lambda a: a[::2, 1::3],
    "transposed": lambda a: a.T,
    "split dim": lambda a: a.reshape(3, 2, 5, 2),
    "one row": lambda a: a[4],
    "new dims": lambda a: a[None, :, None, 2:],
    "no dims": lambda a: a[2, 3],
    "no elements": lambda a: a[:, 5:5],
    "no rows": lambda a: a[3:3],
}


def versions(exporter: Any) -> list[Any]:
    """Return capsules of each DLPack version that the exporter offers."""
    capsules = [exporter.__dlpack__()]
    with contextlib.suppress(TypeError):  # an exporter of before DLPack 1.0
        capsules.append(exporter.__dlpack__(max_version=(1, 0)))
    return capsules


def strides_that_matter(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int | None, ...]:
    """An exporter may write any stride for a dim that nobody walks."""
    return tuple(None if extent == 1 or 0 in shape else stride for extent, stride in zip(shape, strides))


def assert_describes(told: _dlpack.Descriptor, address: int, shape: tuple[int, ...], strides: tuple[int, ...], name: str) -> None:
    assert told.shape == shape
    assert strides_that_matter(told.shape, told.strides) == strides_that_matter(shape, strides)
    assert told.dtype is BY_NAME.get(name)
    assert told.device == (_dlpack.CPU, 0)
    if 0 not in shape:
        assert told.address == address


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", [*NAMES, *UNSTORED])
def test_tensors(name: str, view: str) -> None:
    tensor = VIEWS[view](rows(name))
    for capsule in versions(tensor):
        assert_describes(_dlpack.read(capsule), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), name)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", [name for name in [*NAMES, *UNSTORED] if name != "bfloat16"])
def test_numpy_arrays(name: str, view: str) -> None:
    array = np.asarray(VIEWS[view](rows(name).numpy()))
    strides = tuple(stride // array.itemsize for stride in array.strides)
    for capsule in versions(array):
        assert_describes(_dlpack.read(capsule), array.ctypes.data, array.shape, strides, name)


def test_expanded_and_flipped() -> None:
    tensor = torch.randn(3, 1).expand(2, 3, 4)
    for capsule in versions(tensor):
        assert_describes(_dlpack.read(capsule), tensor.data_ptr(), (2, 3, 4), (0, 1, 0), "float32")
    array = np.random.default_rng().standard_normal((4, 6))[::-1, ::-2]
    for capsule in versions(array):
        assert_describes(_dlpack.read(capsule), array.ctypes.data, (4, 3), (-6, -2), "float64")


def test_the_values_are_found_at_what_was_told() -> None:
    tensor = torch.randn(5, 7, dtype=torch.float64)[1:, ::3]
    told = _dlpack.read(tensor.__dlpack__())
    found = [
        [ctypes.c_double.from_address(told.address + 8 * (i * told.strides[0] + j * told.strides[1])).value for j in range(3)]
        for i in range(4)
    ]
    assert found == tensor.tolist()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_dtypes_without_a_kernel(name: str) -> None:
    tensor = torch.randn(4).to(getattr(torch, name))
    try:
        capsules = versions(tensor)
    except (BufferError, RuntimeError) as error:
        pytest.skip(f"this PyTorch does not export it: {error}")
    for capsule in capsules:
        assert _dlpack.read(capsule).dtype is None


# ---- capsules made by hand ----------------------------------------------------------------------------------------------


def by_hand(name: bytes, structure: ctypes.Structure) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(structure), name, None)


def described(code: int, bits: int, lanes: int = 1, **more: Any) -> _dlpack._Tensor:
    shape = (ctypes.c_int64 * 3)(2, 3, 4)
    return _dlpack._Tensor(data=0x1000, device_type=2, device_id=5, ndim=3, code=code, bits=bits, lanes=lanes, shape=shape, **more)


@pytest.mark.parametrize("versioned", [False, True])
def test_no_strides_means_contiguous_and_the_offset_counts(versioned: bool) -> None:
    """PyTorch and NumPy always write strides, and an offset of 0; the format allows otherwise."""
    tensor = described(2, 32, byte_offset=12)
    structure = _dlpack._Versioned(major=1, minor=1, tensor=tensor) if versioned else tensor
    name = b"dltensor_versioned" if versioned else b"dltensor"
    told = _dlpack.read(by_hand(name, structure))
    assert told == (0x100C, (2, 3, 4), (12, 4, 1), BY_NAME["float32"], (_dlpack.CUDA, 5))


CODES = {
    (0, 8): "int8",
    (0, 64): "int64",
    (1, 8): "uint8",
    (2, 16): "float16",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
}
CODES |= {(5, 64): None, (3, 64): None, (2, 8): None, (0, 128): None, (17, 4): None, (1, 1): None}


@pytest.mark.parametrize(("code", "bits"), CODES)
def test_type_codes(code: int, bits: int) -> None:
    name = CODES[code, bits]
    assert _dlpack.read(by_hand(b"dltensor", described(code, bits))).dtype is (None if name is None else BY_NAME[name])
    assert _dlpack.read(by_hand(b"dltensor", described(code, bits, lanes=4))).dtype is None, "vectors of lanes have no kernel"


@pytest.mark.parametrize("what", [None, 3, "dltensor", object()])
def test_what_is_no_capsule_raises(what: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        _dlpack.read(what)


def test_a_capsule_that_was_consumed_raises() -> None:
    capsule = torch.randn(3).__dlpack__()
    torch.from_dlpack(capsule)
    with pytest.raises(ValueError, match="PyCapsule"):
        _dlpack.read(capsule)


# ---- life and death -----------------------------------------------------------------------------------------------------


class Exporter(np.ndarray):
    """An array that can be watched."""


EXPORTERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randn(1000),
    "numpy": lambda: np.random.default_rng().standard_normal(1000).view(Exporter),
}


@pytest.mark.parametrize("library", EXPORTERS)
def test_reading_does_not_consume(library: str) -> None:
    exporter = EXPORTERS[library]()
    capsule = exporter.__dlpack__()
    assert _dlpack.read(capsule) == _dlpack.read(capsule)
    taken = torch.from_dlpack(capsule)  # a capsule can be taken once only, and this one still can
    assert taken.tolist() == exporter.tolist()


@pytest.mark.parametrize("library", EXPORTERS)
def test_the_memory_goes_back_when_the_capsule_goes(library: str) -> None:
    exporter = EXPORTERS[library]()
    watched = weakref.ref(exporter)
    references = sys.getrefcount(exporter)
    for capsule in versions(exporter):
        _dlpack.read(capsule)
    del capsule
    assert sys.getrefcount(exporter) == references
    told = _dlpack.read(exporter.__dlpack__())
    del exporter
    gc.collect()
    assert watched() is None, "the descriptor is numbers only"
    assert told.shape == (1000,)


@pytest.mark.parametrize("library", EXPORTERS)
def test_ten_thousand_reads_take_no_memory(library: str) -> None:
    exporter = EXPORTERS[library]()
    references = sys.getrefcount(exporter)

    def read_often() -> None:
        for _ in range(10_000):
            _dlpack.read(exporter.__dlpack__())

    read_often()
    gc.collect()
    before = resident_bytes()
    read_often()
    gc.collect()
    grown = resident_bytes() - before
    assert grown < 500_000, f"{grown} bytes stayed"  # a capsule that is never freed takes some 130 bytes
    assert sys.getrefcount(exporter) == references


def resident_bytes() -> int:
    """Resident memory of this process where the system tells it (Linux), else 0."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
