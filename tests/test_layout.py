"""The arithmetic on shapes and strides, against PyTorch and NumPy and against walks over every index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import cupyfused
from cupyfused import _layout
from cupyfused._layout import Strided

torch = pytest.importorskip("torch")

Ints = tuple[int, ...]
EXTENTS = st.sampled_from([0, 1, 1, 2, 2, 3, 4])
MEMORY = ("contiguous", "permuted", "sliced", "channels_last", "expanded", "odd_strides", "windows")


def thorough(examples: int) -> settings:
    """More examples than by default, without a deadline: a loaded machine is slow, not wrong."""
    return settings(max_examples=examples, deadline=None)


def strided(tensor: torch.Tensor) -> Strided:
    return Strided(tuple(tensor.shape), tensor.stride())


def made(geometry: Strided) -> torch.Tensor:
    return torch.empty_strided(geometry.shape, geometry.strides)


def nested(shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return a dense tensor whose dims lie in memory in this order, outermost first."""
    return torch.empty([shape[dim] for dim in order]).permute(np.argsort(order).tolist())


def offsets(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Every index's offset, in row-major order of the indices."""
    return [sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(range, shape))]


# The strategies draw geometries rather than tensors, so that a failing example prints as what matters of it.


def laid_out(draw: st.DrawFn, shape: Ints) -> Strided:
    """Return the geometry of a shape in memory, in one of the ways that PyTorch programs bring about."""
    memory = draw(st.sampled_from(MEMORY))
    order = draw(st.permutations(range(len(shape))))
    if memory == "permuted":
        return strided(nested(shape, order))
    if memory == "sliced":
        steps = [draw(st.integers(1, 3)) for _ in shape]
        whole = nested([extent * step + 1 for extent, step in zip(shape, steps)], order)
        return strided(whole[tuple(slice(1, None, step) for step in steps)])
    if memory == "channels_last" and len(shape) in (4, 5):
        return strided(torch.empty(shape).to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d))
    if memory == "expanded":
        own = [1 if draw(st.booleans()) else extent for extent in shape]
        return strided(torch.empty(own).expand(shape))
    if memory == "odd_strides":
        # Dims of extent 1 have strides that nobody walks, yet the strides of results depend on them.
        odd = (
            draw(st.sampled_from([0, 1, 2, 7, 64])) if extent == 1 else own
            for extent, own in zip(shape, nested(shape, order).stride())
        )
        return Strided(shape, tuple(odd))
    if memory == "windows":
        return Strided(shape, (1,) * len(shape))
    return strided(torch.empty(shape))


@st.composite
def geometries(draw: st.DrawFn, ndim: int = 5) -> Strided:
    return laid_out(draw, tuple(draw(st.lists(EXTENTS, max_size=ndim))))


@st.composite
def operands(draw: st.DrawFn, count: int, extents: st.SearchStrategy[int] = EXTENTS) -> list[Strided]:
    """Return operands that broadcast together; any of them may be the smaller one, or have no dims."""
    shape = tuple(draw(st.lists(extents, max_size=5)))
    found = []
    for _ in range(count):
        share = draw(st.sampled_from(["all", "all", "some", "none"]))
        own = shape if share == "all" else ()
        if share == "some":
            kept = shape[draw(st.integers(0, len(shape))) :]
            own = tuple(1 if draw(st.booleans()) else extent for extent in kept)
        found.append(laid_out(draw, own))
    return found


def broadcast(arrays: Sequence[Strided]) -> tuple[Ints, list[Ints]]:
    """Return the common shape and each operand's strides over it."""
    shape = _layout.broadcast_shapes([one.shape for one in arrays])
    assert shape is not None
    return shape, [_layout.broadcast_strides(one, shape) for one in arrays]


# ---- shapes -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(EXTENTS, max_size=5).map(tuple), min_size=1, max_size=4))
@thorough(200)
def test_broadcast_shapes_agrees_with_numpy(shapes: list[Ints]) -> None:
    try:
        expected = np.broadcast_shapes(*shapes)
    except ValueError:
        expected = None
    assert _layout.broadcast_shapes(shapes) == expected


@given(st.lists(st.sampled_from([1, 2, 3]), max_size=4), st.data())
@thorough(150)
def test_broadcast_strides_walk_what_expand_walks(shape: list[int], data: st.DataObject) -> None:
    own = tuple(1 if data.draw(st.booleans()) else extent for extent in shape[data.draw(st.integers(0, len(shape))) :])
    array = laid_out(data.draw, own)
    strides = _layout.broadcast_strides(array, tuple(shape))
    assert offsets(shape, strides) == offsets(shape, made(array).expand(shape).stride())


# ---- the strides of results ---------------------------------------------------------------------------------------------


@given(operands(2))
@thorough(250)
def test_result_strides_are_those_of_a_binary_operation(pair: list[Strided]) -> None:
    shape, _ = broadcast(pair)
    assert _layout.result_strides(shape, pair) == torch.mul(*map(made, pair)).stride()


@given(operands(3))
@thorough(200)
def test_result_strides_fold_to_those_of_the_composed_expression(three: list[Strided]) -> None:
    own = three[0]
    for other in three[1:]:
        shape, _ = broadcast([own, other])
        own = Strided(shape, _layout.result_strides(shape, [own, other]))
    x, scale, bias = map(made, three)
    composed = x * scale + bias
    assert own.strides == composed.stride()
    assert cupyfused.fused_scale_bias(x, scale, bias).stride() == composed.stride()


BOUNDS = [(-0.5, None), (None, 0.5), (-0.5, 0.5), (torch.tensor(-0.5), None), (torch.tensor(-0.5), torch.tensor(0.5))]


@given(operands(3), st.sampled_from(BOUNDS))
@thorough(200)
def test_a_clamped_result_has_the_strides_of_the_composed_expression(three: list[Strided], bounds: tuple[Any, Any]) -> None:
    x, scale, bias = map(made, three)
    expected = (x * scale + bias).clamp(*bounds)
    assert cupyfused.fused_scale_bias_clamp(x, scale, bias, *bounds).stride() == expected.stride()


def test_bounds_that_are_numbers_make_a_clamped_column_contiguous() -> None:
    x = torch.empty(3).uniform_(1, 2).as_strided((3, 1), (1, 5))
    assert (x * 2 + 1).stride() == (1, 3)
    assert cupyfused.fused_scale_bias_clamp(x, 2, 1, 0.5, 2.5).stride() == (x * 2 + 1).clamp(0.5, 2.5).stride()


@given(geometries())
@thorough(200)
def test_result_strides_of_a_unary_operation_and_beside_a_number(array: Strided) -> None:
    assert _layout.result_strides(array.shape, [array]) == made(array).clamp(-0.5, 0.5).stride()
    assert _layout.result_strides(array.shape, [array, Strided((), ())]) == (made(array) * 2.5).stride()


def test_channels_last_in_three_dims_of_space_keeps_the_strides_of_single_elements() -> None:
    """TensorIterator knows channels_last of four dims only; of five it keeps what is dense as it is."""
    array = Strided((2, 3, 3, 1, 2), (18, 1, 6, 6, 3))
    for strides in (array.strides, (18, 1, 6, 3, 3), (18, 1, 6, 0, 3)):
        one = Strided(array.shape, strides)
        assert made(one).is_contiguous(memory_format=torch.channels_last_3d)
        assert _layout.result_strides(one.shape, [one]) == made(one).neg().stride()
        assert _layout.result_strides(one.shape, [one, array]) == (made(one) + made(array)).stride()


@given(geometries())
@thorough(250)
def test_like_strides_are_those_of_empty_like(array: Strided) -> None:
    assert _layout.like_strides(array) == torch.empty_like(made(array)).stride()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 4, 1)])
def test_result_strides_of_every_order_of_four_dims(shape: Ints, order: Ints) -> None:
    x = nested(shape, order)
    for other in (x, torch.empty(shape), torch.empty(shape[1], 1, 1), torch.empty(()), x[..., :1]):
        assert _layout.result_strides(shape, [strided(x), strided(other)]) == (x + other).stride()
        assert _layout.result_strides(shape, [strided(other), strided(x)]) == (other + x).stride()


# ---- properties of one array --------------------------------------------------------------------------------------------


@given(geometries())
@thorough(200)
def test_contiguous_is_what_torch_calls_contiguous(array: Strided) -> None:
    assert _layout.is_contiguous(array) == made(array).is_contiguous()
    assert _layout.contiguous_strides(array.shape) == torch.empty(array.shape).stride()


@given(geometries())
@thorough(250)
def test_dense_means_that_every_place_of_one_stretch_is_taken_once(array: Strided) -> None:
    assert _layout.is_dense(array) == (sorted(offsets(*array)) == list(range(math.prod(array.shape))))


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
@thorough(200)
def test_what_does_not_overlap_itself_has_a_place_for_each_index(shape: list[int], data: st.DataObject) -> None:
    strides = tuple(data.draw(st.integers(-9, 9)) for _ in shape)
    places = offsets(shape, strides)
    if not _layout.overlaps_itself(Strided(tuple(shape), strides)):
        assert len(set(places)) == len(places)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
@thorough(250)
def test_no_slice_flip_or_permutation_of_a_dense_array_overlaps_itself(shape: list[int], data: st.DataObject) -> None:
    steps = [data.draw(st.sampled_from([-3, -2, -1, 1, 2, 3])) for _ in shape]
    whole = np.empty([extent * abs(step) for extent, step in zip(shape, steps)], dtype=np.float32)
    view = whole[tuple(slice(None, None, step) for step in steps)].transpose(data.draw(st.permutations(range(len(shape)))))
    assert not _layout.overlaps_itself(Strided(view.shape, tuple(stride // 4 for stride in view.strides)))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2,), (0,)), ((3, 2), (0, 1)), ((2, 3), (1, 1)), ((4, 4), (3, 1)), ((2, 2, 2), (4, 1, 1)), ((3, 3), (-1, 1))],
)
def test_expanded_arrays_and_windows_overlap_themselves(shape: Ints, strides: Ints) -> None:
    assert _layout.overlaps_itself(Strided(shape, strides))


# ---- collapse -----------------------------------------------------------------------------------------------------------


def walk(extents: Ints, strides: Sequence[Ints]) -> list[Ints]:
    """What each index makes of every operand's offset, sorted: the order of the walk is free, the pairing is not."""
    return sorted(zip(*(offsets(extents, own) for own in strides)))


NONEMPTY = st.sampled_from([1, 2, 2, 3, 4])


@given(operands(3, NONEMPTY), st.permutations(range(3)))
@thorough(200)
def test_a_collapsed_layout_visits_the_offsets_of_the_original(three: list[Strided], order_by: list[int]) -> None:
    shape, strides = broadcast(three)
    layout = _layout.collapse(shape, strides, order_by[:2])
    assert len(layout.extents) <= max(len(shape), 1)
    assert math.prod(layout.extents) == math.prod(shape)
    assert walk(layout.extents, layout.strides) == walk(shape, strides)


@given(operands(3, NONEMPTY), st.data())
@thorough(200)
def test_dims_of_different_marks_stay_apart(three: list[Strided], data: st.DataObject) -> None:
    shape, strides = broadcast(three)
    apart = [tuple(data.draw(st.integers(0, 1)) for _ in shape) for _ in range(data.draw(st.integers(1, 3)))]
    layout = _layout.collapse(shape, strides, [0, 1, 2], apart)
    assert walk(layout.extents, layout.strides) == walk(shape, strides)
    # Along the marked dims alone, the layout must go where the original goes: else a gradient were summed over too much.
    for marks, wanted in itertools.product(apart, (0, 1)):
        of_shape = [tuple(stride if mark == wanted else 0 for stride, mark in zip(own, marks)) for own in strides]
        kept = [marks[dim] == wanted for dim in layout.dims] or [False]
        of_layout = [tuple(stride if keep else 0 for stride, keep in zip(own, kept)) for own in layout.strides]
        assert walk(layout.extents, of_layout) == walk(shape, of_shape)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
@thorough(200)
def test_dense_arrays_in_one_order_collapse_to_one_dim(shape: list[int], data: st.DataObject) -> None:
    x = nested(shape, data.draw(st.permutations(range(len(shape)))))
    layout = _layout.collapse(tuple(shape), [x.stride()] * 3, [0, 1, 2])
    assert layout.extents == (math.prod(shape),)
    assert set(layout.strides) <= {(1,), (0,)}


def test_per_channel_parameters_collapse_to_three_dims() -> None:
    shape = (8, 3, 16, 24)
    x, scale = torch.empty(shape), torch.empty(3, 1, 1)
    _, strides = broadcast([strided(x), strided(scale)])
    layout = _layout.collapse(shape, strides, [0, 1])
    assert layout.extents == (16 * 24, 3, 8)
    assert layout.strides == ((1, 384, 1152), (0, 1, 0))
    assert layout.dims == (2, 1, 0)
