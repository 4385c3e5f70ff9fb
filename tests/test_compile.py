"""Every kernel instance compiles for every architecture, and no call asks for one outside that table. Needs NVRTC, no GPU."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cupyfused
from cupyfused import _kernel
from cupyfused._dtypes import BY_NAME, DTYPES, Rank, Typed, fold_types
from cupyfused._launch import Launcher
from cupyfused._layout import Strided, broadcast_shapes, broadcast_strides, contiguous_strides
from cupyfused._map_plan import map_plan
from cupyfused._op import Op
from cupyfused._plan import Backend, Described, storage
from cupyfused._source import Variant
from cupyfused._sum_plan import sum_plan
from cupyfused._variants import storages, table
from cupyfused.ops import fused_scale_bias, fused_scale_bias_clamp

OPS = (fused_scale_bias.OP, fused_scale_bias_clamp.OP)


def _numbers(op: Op) -> tuple[float, ...]:
    """Numbers of backward: constants of a kernel, which differ between releases of PyTorch."""
    return (0.5, 1.0, 0.0)[: len(op.backward_numbers)]


TABLE = table(OPS, DTYPES, _numbers, large=True)
F32 = BY_NAME["float32"]
# Every instance is compiled for sm_90, and of the other architectures each takes every 19th, together a third: what differs
# between them is a few lines of `common.cuh`. (Not every 18th: the table repeats itself after twos and threes.) All for all take
# 35 minutes on two cores: `pytest --every-architecture`, for a change of `cuda_src`.
EVERY = 19
OTHERS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_90", *OTHERS])
@pytest.mark.parametrize("part", range(4))  # so that processes share them
def test_instances_compile(arch: str, part: int, request: pytest.FixtureRequest) -> None:
    wanted = TABLE
    if arch in OTHERS and not request.config.getoption("--every-architecture"):
        wanted = TABLE[OTHERS.index(arch) :: EVERY]
    for variant in wanted[part::4]:
        assert _kernel.compile_cubin(variant, arch).startswith(b"\x7fELF")


def test_the_table_names_each_instance_once() -> None:
    assert len(set(TABLE)) == len(TABLE)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["float32"], {("float32", "float32")}),
        (["int32"], {("int32", "int32"), ("any_dtype", "float32")}),  # beside a floating number
        (["bool"], {("any_dtype", "bool"), ("any_dtype", "int64"), ("any_dtype", "float32")}),
        (
            ["bfloat16", "float32"],
            {(x, result) for x in ("bfloat16", "any_dtype") for result in ("bfloat16", "float32")} | {("float32", "float32")},
        ),
    ],
)
def test_storages_are_those_that_calls_can_have(names: list[str], expected: set[tuple[str, str]]) -> None:
    assert {(one.x, one.result.name) for one in storages([BY_NAME[name] for name in names])} == expected


# ---- no plan leaves the table -------------------------------------------------------------------------------------------


class _Recorder:
    """Stands in for a device: notes what is asked for, launches nothing."""

    def __init__(self) -> None:
        self.asked: set[Variant] = set()
        self.backend = Backend("recorder", self._load, 132)

    def _load(self, variant: Variant) -> Launcher:
        self.asked.add(variant)
        return lambda grid, buffer, stream: None


@st.composite
def _array(draw: st.DrawFn, shape: tuple[int, ...]) -> Described:
    """An array that broadcasts to `shape`: dims dropped or 1, strides permuted, with gaps or expanded, aligned or not."""
    own = tuple(1 if draw(st.integers(0, 3)) == 0 else extent for extent in shape)[draw(st.integers(0, len(shape))) :]
    order = draw(st.permutations(range(len(own))))
    strides = contiguous_strides(own, order)
    gap = draw(st.sampled_from([1, 1, 1, 2, 3, 1 << 31]))
    strides = tuple(0 if draw(st.integers(0, 9)) == 0 else stride * gap for stride in strides)
    dtype = BY_NAME[draw(st.sampled_from([*BY_NAME, "float32", "bfloat16", "float32"]))]
    return Described(dtype, Strided(own, strides), draw(st.sampled_from([0, 0, 0, dtype.size % 16])))


@given(st.data())
def test_plans_ask_only_for_instances_of_the_table(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(OPS))
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 17, 64, 1000]), max_size=5)))
    inputs = [data.draw(_array(shape)) for _ in op.inputs]
    if data.draw(st.booleans()):
        inputs[2] = Described(BY_NAME["float32"])
    has_options = bool(op.options) and data.draw(st.booleans())
    options = [Described(BY_NAME["float32"]) if has_options else Described()] * len(op.options)
    typed = [
        [Typed(one.dtype, Rank.ARRAY if one.array else Rank.NUMBER) for one in part if one.dtype] for part in (inputs, options)
    ]
    result = fold_types(*typed)
    assume(op.takes_bool or result.name != "bool")  # refused before there is a plan
    whole = broadcast_shapes([one.array.shape for one in inputs if one.array])
    assert whole is not None
    recorder = _Recorder()
    y = Described(result, Strided(whole, contiguous_strides(whole)))
    map_plan(op, whole, [y, *inputs, *options], recorder.backend)
    if result.is_floating and math.prod(whole):
        wanted = [data.draw(st.booleans()) and one.array is not None for one in inputs]
        saved = op.saved(wanted, has_options)
        present = [one if name in saved else Described() for name, one in zip(op.inputs, inputs)]
        gradients = [
            Described(one.dtype, Strided(one.array.shape, contiguous_strides(one.array.shape))) if asked and one.array else None
            for one, asked in zip(inputs, wanted)
        ]
        grad_out = y._replace(array=Strided(whole, broadcast_strides(data.draw(_array(whole)).array or Strided((), ()), whole)))
        sum_plan(op, whole, [grad_out, *present], options, _numbers(op), gradients, storage(inputs, result), recorder.backend)
    assert recorder.asked <= set(TABLE), [variant.describe() for variant in recorder.asked - set(TABLE)]


PATTERNS = list(itertools.product((False, True), repeat=3))


def _planned(op: Op, inputs: list[Described], has_options: bool, backend: Backend) -> None:
    """Plan forward and, for every choice of gradients, backward, as a call without gaps would."""
    shape = broadcast_shapes([one.array.shape for one in inputs if one.array])
    assert shape is not None
    y, number = Described(F32, Strided(shape, contiguous_strides(shape))), Described(F32)
    options = [number if has_options else Described()] * len(op.options)
    map_plan(op, shape, [y, *inputs, *options], backend)
    for wanted in PATTERNS[1:]:
        saved = op.saved(wanted, has_options)
        present = [one if name in saved else Described() for name, one in zip(op.inputs, inputs)]
        gradients = [one._replace(alignment=0) if asked else None for one, asked in zip(inputs, wanted)]
        sum_plan(op, shape, [y, *present], options, _numbers(op), gradients, storage(inputs, F32), backend)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_plans_ask_for_every_instance_of_the_table(op: Op) -> None:
    """What no call asks for would be compiled ahead for nothing."""
    recorder = _Recorder()
    for shape in ((4, 500, 600), (600, 500, 4), (4, 500, 601), (64, 5, 601), (600, 501, 3), (5, 3)):
        own = [tuple(extent if kept else 1 for extent, kept in zip(shape, pattern)) for pattern in PATTERNS]
        arrays = [Described(F32, Strided(one, contiguous_strides(one))) for one in (shape, *own)]
        for alignment, scale, bias, has_options in itertools.product((0, 4), arrays, arrays, (False, True)):
            x = arrays[0]._replace(alignment=alignment)
            _planned(op, [x, scale, bias], has_options and bool(op.options), recorder.backend)
        _planned(op, [arrays[1], arrays[0], arrays[0]], bool(op.options), recorder.backend)  # an x that is broadcast
    assert set(table([op], [F32], _numbers, large=False)) == recorder.asked


# For parameters of these shapes, the ways in which a backward pass may divide their sums: the shape chooses among them.
LAYOUTS = {
    "of each element": (slice(0, 3), {"STORES"}),
    "of each channel": (slice(1, 2), {"SUMS", "SUMS_ROWS"}),
    "of the last dim": (slice(2, 3), {"SUMS"}),
}


@pytest.mark.parametrize("parameters", LAYOUTS)
def test_shapes_and_numbers_make_no_instances(monkeypatch: pytest.MonkeyPatch, parameters: str) -> None:
    """200 random shapes of one layout class, with other bounds each time, ask for one kernel forward and one a duty backward."""
    torch = pytest.importorskip("torch")
    recorder, random = _Recorder(), np.random.default_rng()
    monkeypatch.setattr("cupyfused._host.backend", recorder.backend)
    monkeypatch.setattr(fused_scale_bias_clamp.OP, "calls", {})  # the plans of this test launch nothing
    own, duties = LAYOUTS[parameters]
    for rows, channels, columns in random.integers(2, 20, (200, 3)).tolist():
        x = torch.empty((rows, channels, 4 * columns), requires_grad=True)
        shape = [extent if dim in range(3)[own] else 1 for dim, extent in enumerate(x.shape)]
        scale, bias = (torch.empty(shape, requires_grad=True) for _ in range(2))
        y = cupyfused.fused_scale_bias_clamp(x, scale, bias, -random.random(), random.random(), impl="host")
        torch.autograd.grad(y, (x, scale, bias), torch.empty_like(y))
    asked = {direction: [one for one in recorder.asked if one.direction == direction] for direction in ("forward", "backward")}
    assert len(asked["forward"]) == 1
    assert {one.duties for one in asked["backward"]} <= {("STORES", duty, duty) for duty in duties}
    assert 1 <= len(asked["backward"]) <= len(duties)
    assert len(recorder.asked) <= 1 + len(duties) + 1, "and one that finishes sums"
