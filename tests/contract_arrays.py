"""The part of the contract for NumPy and CuPy arrays: they give what tensors give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checks import OpUnderTest, assert_same, assert_unwritten, draw_arguments, snapshot
from contract_calls import LAST_DIM
from layouts import draw, flipped
from targets import Target
from torch import Tensor

__all__ = ["Arrays", "as_array", "as_tensor"]


class Arrays:
    """Every check of a call with NumPy arrays on the CPU and CuPy arrays on a GPU."""

    op: OpUnderTest

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "uint8"])
    def test_arrays_give_what_tensors_give(self, target: Target, generator: torch.Generator, dtype: str) -> None:
        """Bit for bit: values and dtype, for whole arrays, slices, crops and transposed ones; and an array of their own."""
        options = self.op.options[0] if "float" in dtype else self.op.integer_options[0]
        for layout in ("contiguous", "transposed", "sliced", "cropped", "expanded"):
            tensors = draw_arguments(self.op, generator, LAST_DIM, [getattr(torch, dtype)], target.device, [layout])
            arrays = [as_array(target, value) for value in tensors]
            before = snapshot(tensors)
            y = target.run(self.op.call, *arrays, *options)
            assert type(y) is type(arrays[0])
            assert_same(as_tensor(y), target.run(self.op.call, *tensors, *options).contiguous())
            y[...] = 7
            assert_unwritten(tensors, before)

    @pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
    def test_flipped_arrays(self, target: Target, generator: torch.Generator, dtype: str) -> None:
        """Negative strides, which no tensor has: `frame[..., ::-1]`."""
        options = self.op.options[0] if "float" in dtype else self.op.integer_options[0]
        tensors = draw_arguments(self.op, generator, ((3, 5, 16), (5, 16), (5, 1)), [getattr(torch, dtype)], target.device)
        arrays = [flipped(as_array(target, value)) for value in tensors]
        y = target.run(self.op.call, *arrays, *options)
        copies = [as_tensor(array.copy()) for array in arrays]
        assert_same(as_tensor(y), target.run(self.op.call, *copies, *options))

    def test_arrays_promote_as_tensors_do(self, target: Target, generator: torch.Generator) -> None:
        """uint8 times 0.5 is float32 and not float64, for every array kind."""
        x = draw(generator, (5, 16), torch.uint8, target.device)
        numbers = [0.5, 0.25][: len(self.op.inputs) - 1]
        y = target.run(self.op.call, as_array(target, x), *numbers, *self.op.options[0])
        assert y.dtype == np.float32
        assert_same(as_tensor(y), target.run(self.op.call, x, *numbers, *self.op.options[0]))

    @pytest.mark.parametrize("make", [np.float32, np.float64, np.int16, np.bool_, np.array], ids=lambda make: make.__name__)
    def test_values_of_numpy_without_dims_are_numbers(
        self, target: Target, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, make: Any
    ) -> None:
        """Of whatever dtype: they promote as Python's numbers do, and a second call takes the short cut that those take."""
        x, options = as_array(target, draw(generator, (5, 16), torch.float32, target.device)), self.op.options[0]
        for number in (1, 0):
            others = [number] * (len(self.op.inputs) - 1)
            expected = as_tensor(target.run(self.op.call, x, *[make(one).item() for one in others], *options))
            y = target.run(self.op.call, x, *[make(one) for one in others], *options)
            assert_same(as_tensor(y), expected)
            monkeypatch.setattr("cupyfused._array_call.open_operands", None)

    def test_out_of_arrays(self, target: Target, generator: torch.Generator) -> None:
        arguments = draw_arguments(self.op, generator, LAST_DIM, [torch.float32], target.device)
        expected = self.op.fused(target, self.op.options[0])(*arguments)
        arrays = [as_array(target, value) for value in arguments]
        base = as_array(target, draw(generator, (10, 16), torch.float32, target.device))
        rest = base[1::2].copy()
        assert target.run(self.op.call, *arrays, *self.op.options[0], out=base[::2]).base is base
        assert_same(as_tensor(base[::2].copy()), expected)
        assert bool((base[1::2] == rest).all())

    def test_bfloat16_arrays(self, target: Target, generator: torch.Generator) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        arguments = draw_arguments(self.op, generator, LAST_DIM, [torch.bfloat16], target.device)
        arrays = [as_array(target, value.float()).astype(ml_dtypes.bfloat16) for value in arguments]
        y = target.run(self.op.call, *arrays, *self.op.options[0])
        assert y.dtype == ml_dtypes.bfloat16
        assert_same(as_tensor(y.astype(np.float32)), self.op.fused(target, self.op.options[0])(*arguments).float())


def as_array(target: Target, tensor: Tensor) -> Any:
    """Return a NumPy or CuPy array over the memory of a tensor."""
    if target.device == "cpu":
        return tensor.numpy()
    cupy = pytest.importorskip("cupy")
    torch.cuda.synchronize()
    return cupy.from_dlpack(tensor)


def as_tensor(array: Any) -> Tensor:
    """Return a tensor with the values of a NumPy or CuPy array."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(array))
    array.device.synchronize()
    return torch.from_dlpack(array.copy())
