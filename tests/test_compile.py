"""Every kernel instance compiles for every architecture, and no call asks for one outside that table. Needs NVRTC, no GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from variants import NUMBERS, finishing_variants, variants

from cupyfused import _kernel
from cupyfused._dtypes import BY_NAME, Rank, Typed, fold_types
from cupyfused._layout import Strided, broadcast_shapes, broadcast_strides, contiguous_strides
from cupyfused._plan import Backend, Described, map_plan, storage
from cupyfused._sum_plan import sum_plan
from cupyfused.errors import CudaError
from cupyfused.ops import fused_scale_bias, fused_scale_bias_clamp

OPS = (fused_scale_bias.OP, fused_scale_bias_clamp.OP)
TABLE = [*(variant for op in OPS for variant in variants(op)), *finishing_variants()]
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def _nvrtc_is_there() -> bool:
    try:
        return _kernel.nvrtc_version() >= (12, 0)
    except CudaError:
        return False


needs_nvrtc = pytest.mark.skipif(not _nvrtc_is_there(), reason="NVRTC comes with pip install 'cupyfused[cuda13]'")


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("direction", ["forward", "backward", "sum_partials"])
def test_every_variant_compiles_for_every_architecture(direction: str, arch: str) -> None:
    for variant in TABLE:
        if variant.direction == direction:
            assert _kernel.compile_cubin(variant, arch).startswith(b"\x7fELF")


def test_the_table_names_each_instance_once() -> None:
    assert len(set(TABLE)) == len(TABLE)


# ---- no plan leaves the table -------------------------------------------------------------------------------------------


class _Recorder:
    """Stands in for a device: notes what is asked for, launches nothing."""

    def __init__(self) -> None:
        self.asked: set[_kernel.Variant] = set()
        self.backend = Backend("recorder", self._load, 132)

    def _load(self, variant: _kernel.Variant) -> object:
        self.asked.add(variant)
        return None


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
    options = [Described(BY_NAME["float32"])] * len(op.options)
    typed = [[Typed(one.dtype, Rank.ARRAY if one.array else Rank.NUMBER) for one in part] for part in (inputs, options)]
    result = fold_types(*typed)
    whole = broadcast_shapes([one.array.shape for one in inputs if one.array])
    assert whole is not None
    recorder = _Recorder()
    y = Described(result, Strided(whole, contiguous_strides(whole)))
    map_plan(op, whole, [y, *inputs, *options], recorder.backend)
    if result.is_floating and math.prod(whole):
        wanted = [data.draw(st.booleans()) and one.array is not None for one in inputs]
        saved = op.saved(wanted, bool(options))
        present = [one if name in saved else Described() for name, one in zip(op.inputs, inputs)]
        gradients = [
            Described(one.dtype, Strided(one.array.shape, contiguous_strides(one.array.shape))) if asked and one.array else None
            for one, asked in zip(inputs, wanted)
        ]
        grad_out = y._replace(array=Strided(whole, broadcast_strides(data.draw(_array(whole)).array or Strided((), ()), whole)))
        numbers = NUMBERS[: len(op.backward_numbers)]
        sum_plan(op, whole, [grad_out, *present], options, numbers, gradients, storage(inputs, result), recorder.backend)
    assert recorder.asked <= set(TABLE), [variant.describe() for variant in recorder.asked - set(TABLE)]


def test_shapes_and_numbers_do_not_make_instances() -> None:
    """200 random shapes of one layout class ask for one instance each way."""
    random = np.random.default_rng()
    op, recorder = fused_scale_bias_clamp.OP, _Recorder()
    number, f32 = Described(BY_NAME["float32"]), BY_NAME["float32"]
    for _ in range(200):
        shape = (int(random.integers(2, 50)), int(random.integers(2, 50)), 4 * int(random.integers(1, 50)))
        x = Described(f32, Strided(shape, contiguous_strides(shape)))
        channel = Described(f32, Strided((shape[1], 1), (1, 1)))
        map_plan(op, shape, [x, x, channel, channel, number, number], recorder.backend)
    assert len(recorder.asked) == 1
