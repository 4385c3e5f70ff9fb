"""What users of fused operators ran into, on a CPU and on a GPU alike."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from checks import assert_agree, assert_same
from contract_arrays import as_array, as_tensor
from layouts import draw, lay
from targets import Target
from torch import Tensor, nn

from cupyfused import fused_scale_bias, fused_scale_bias_clamp


def composed(x: Any, scale: Any, bias: Any, min_val: Any, max_val: Any) -> Tensor:
    return torch.clamp(x * scale + bias, min_val, max_val)


def test_uninitialised_memory_is_poisoned_in_every_test() -> None:
    """Else an element that no kernel writes could hold the right value by chance."""
    assert torch.empty(3).isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), dtype=torch.bfloat16).isnan().all()
    assert (torch.empty_like(torch.ones(3, dtype=torch.uint8)) == 255).all()
    assert np.isnan(np.empty(3)).all()
    assert (np.empty(3, np.uint8) == 255).all()


# ---- memory ---------------------------------------------------------------------------------------------------------------


def test_sources_may_go_as_soon_as_the_call_returns(target: Target, generator: torch.Generator) -> None:
    """And their memory may be taken by others; forward and backward hold what they need."""
    whole = draw(generator, (4, 6), torch.float64, target.device)
    expected = composed(whole[1:3, ::2], 1.5, 0.25, -1.0, 1.0)
    y = target.run(fused_scale_bias_clamp, whole[1:3, ::2], 1.5, 0.25, -1.0, 1.0)
    leaf = whole.clone().requires_grad_()
    scale = torch.full((3,), 1.5, dtype=torch.float64, device=target.device, requires_grad=True)
    loss = target.run(fused_scale_bias, leaf[1:3, ::2] * 1.0, scale * 1.0, 0.25).sum()
    sums = leaf.detach()[1:3, ::2].sum(0)
    del whole
    gc.collect()
    filled = [torch.full((4, 6), 9.0, dtype=torch.float64, device=target.device) for _ in range(50)]
    loss.backward()
    assert_agree(y, expected)
    assert scale.grad is not None
    assert_agree(scale.grad, sums)
    assert len(filled) == 50


def test_result_of_a_whole_overlapping_window_is_its_own(target: Target, generator: torch.Generator) -> None:
    """Frames cut from one recording share memory; their results do not."""
    recording = draw(generator, (40,), torch.float32, target.device)
    frames = recording.as_strided((9, 16), (3, 1))
    y = target.run(fused_scale_bias, frames, 1, 0)
    y[0] = 7
    assert_agree(y[1:], frames[1:])


# ---- frames ---------------------------------------------------------------------------------------------------------------


def test_bgr_frames_become_rgb_without_a_copy(target: Target, generator: torch.Generator) -> None:
    """`frame[..., ::-1]`, the idiom of OpenCV: negative strides on uint8, per-channel float parameters in the last dim."""
    frame = as_array(target, torch.randint(256, (71, 127, 3), generator=generator).to(target.device, torch.uint8))
    scale, bias = (as_array(target, draw(generator, (3,), torch.float32, target.device)) for _ in range(2))
    y = target.run(fused_scale_bias_clamp, frame[..., ::-1], scale, bias, -100.0, 100.0)
    assert (y.dtype, y.shape) == (np.float32, frame.shape)
    assert_same(as_tensor(y), as_tensor(target.run(fused_scale_bias_clamp, frame[..., ::-1].copy(), scale, bias, -100.0, 100.0)))
    assert_same(
        as_tensor(y)[..., 0],
        target.run(fused_scale_bias_clamp, as_tensor(frame[..., 2]), as_tensor(scale)[0], as_tensor(bias)[0], -100.0, 100.0),
    )


def test_pitched_rows_are_read_in_place(target: Target, generator: torch.Generator) -> None:
    """As a decoder hands them over: 2,048 bytes a row of 1,920; what is in the gap must not matter."""
    surface = torch.randint(256, (7, 2048), generator=generator).to(target.device, torch.uint8)
    frame = surface[:, :1920].view(7, 640, 3)
    scale, bias = (draw(generator, (3,), torch.float32, target.device) for _ in range(2))
    expected = target.run(fused_scale_bias, frame.contiguous(), scale, bias)
    surface[:, 1920:] = 0
    y = target.run(fused_scale_bias, frame, scale, bias)
    surface.zero_()
    assert_same(y, expected)


def test_uint8_never_wraps_beside_floats(target: Target) -> None:
    """uint8 times 0.5 is float32, bounds given as integers included; all 256 values."""
    x = torch.arange(256, device=target.device).to(torch.uint8)
    for scale, bias in ((0.5, 0.0), (2.0, 10), (1.5, -20.25)):
        y = target.run(fused_scale_bias_clamp, x, scale, bias, 0, 255)
        assert y.dtype is torch.float32
        assert_same(y, (x.double() * scale + bias).clamp(0, 255).float())
        assert not y.requires_grad


def test_uint8_wraps_beside_integers(target: Target) -> None:
    """In packets of 16, alone, and at every alignment: all values, compared with torch's."""
    x = torch.arange(5 * 256 + 3, device=target.device).to(torch.uint8)
    for start in range(17):
        for scale, bias in ((3, 7), (255, 1), (1, 0)):
            assert_same(target.run(fused_scale_bias, x[start:], scale, bias), x[start:] * scale + bias)
    low = target.run(fused_scale_bias_clamp, x, 3, 7, 16, 235)
    assert_same(low, (x * 3 + 7).clamp(16, 235))


class Frames(torch.utils.data.Dataset[Tensor]):
    """A data set that normalises in the loader's worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> Tensor:
        frame = (np.arange(5 * 7 * 3, dtype=np.uint8) + k).reshape(5, 7, 3)
        return torch.from_numpy(
            fused_scale_bias_clamp(frame, np.float32(1 / 255), np.array([-0.5, -0.25, -0.125], np.float32), -1.0, 1.0)
        )


def test_numpy_frames_in_data_loader_workers(target: Target) -> None:
    """A worker is forked from a process that has used CUDA; NumPy arrays must not touch it there."""
    x = torch.arange(5 * 7 * 3, device=target.device).view(5, 7, 3)
    bias = torch.tensor([-0.5, -0.25, -0.125], device=target.device)
    expected = [target.run(fused_scale_bias_clamp, (x + k).to(torch.uint8), 1 / 255, bias, -1.0, 1.0).cpu() for k in range(4)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # Python 3.12: the parent has threads
        frames = list(torch.utils.data.DataLoader(Frames(), batch_size=None, num_workers=2, multiprocessing_context="fork"))
    for frame, right in zip(frames, expected, strict=True):
        torch.testing.assert_close(frame, right, rtol=0, atol=2**-23)


# ---- threads --------------------------------------------------------------------------------------------------------------


def test_sixteen_threads_call_for_the_first_time_at_once(target: Target, generator: torch.Generator) -> None:
    """Instances that no other test has built: int8 with a parameter of another dtype, told at run time."""
    x, scale = draw(generator, (6, 15), torch.int8, target.device), draw(generator, (15,), torch.int32, target.device)
    barrier, results = threading.Barrier(16), [x] * 16

    def call(place: int) -> None:
        barrier.wait()
        results[place] = target.run(fused_scale_bias, x, scale, place)

    threads = [threading.Thread(target=call, args=(place,)) for place in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, result in enumerate(results):
        assert_same(result, x * scale + place)


# ---- tracing --------------------------------------------------------------------------------------------------------------


class Normalise(nn.Module):
    """A small model around the op."""

    def __init__(self, target: Target):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5, -0.5, 2.0, 0.75, 1.0], device=target.device))

    def forward(self, x: Tensor) -> Tensor:
        return fused_scale_bias_clamp(x, self.scale, 0.25, -1.0, 1.0).tanh()


def by_trace(model: nn.Module, example: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.jit.trace(model, example)  # type: ignore[no-any-return, no-untyped-call]


def by_compile(model: nn.Module, example: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)


@pytest.mark.parametrize("make", [by_trace, by_compile], ids=["jit.trace", "compile"])
def test_traced_models_take_other_sizes(target: Target, generator: torch.Generator, make: Any, fresh_dynamo: None) -> None:
    """Sizes reach a kernel as arguments when it runs; nothing of the traced call is baked in."""
    model = Normalise(target)
    traced = make(model, draw(generator, (3, 5), torch.float32, target.device))
    for rows in (3, 7, 12):
        x = draw(generator, (rows, 5), torch.float32, target.device).requires_grad_()
        y, expected = traced(x), composed(x, model.scale, 0.25, -1.0, 1.0).tanh()
        assert_agree(y, expected)
        leaves = (x, model.scale)
        for gradient, right in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)):
            assert_agree(gradient, right)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ---- numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_subnormals_are_kept(target: Target, dtype: torch.dtype) -> None:
    """Fast mathematics is off: nothing tiny is flushed to zero, forward or backward."""
    tiny = torch.finfo(dtype).smallest_normal / torch.tensor([2, -4, 8, 16], dtype=torch.float64).repeat(8)
    x = tiny.to(target.device, dtype).requires_grad_()
    y = target.run(fused_scale_bias_clamp, x, 1, 0, -1.0, 1.0)
    assert_same(y.detach(), x.detach())
    assert y.count_nonzero() == 32
    (gradient,) = torch.autograd.grad(target.run(fused_scale_bias, x, 1, 0), x, x.detach())
    assert_same(gradient, x.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_ones_do_not_saturate(target: Target, dtype: torch.dtype) -> None:
    """Added in 16 bits they stop at 2,048 and 256."""
    for x_shape, shape in (((6_000, 8), (8,)), ((3, 4, 1_500), (4, 1)), ((8_192,), ())):
        x = torch.ones(x_shape, dtype=dtype, device=target.device)
        scale, bias = (torch.ones(shape, dtype=dtype, device=target.device, requires_grad=True) for _ in range(2))
        target.run(fused_scale_bias, x, scale, bias).sum().backward()
        for parameter in (scale, bias):
            assert parameter.grad is not None
            assert_same(parameter.grad, torch.full(shape, x.numel() / parameter.numel(), dtype=dtype, device=target.device))


def test_gradients_of_half_overflow_only_at_the_end(target: Target) -> None:
    """70,000 - 60,000 = 10,000: the sum passes what half holds, its end does not."""
    grad_out = torch.cat([torch.full((7_000,), 10.0), torch.full((6_000,), -10.0)]).to(target.device, torch.float16)
    bias = torch.zeros((), dtype=torch.float16, device=target.device, requires_grad=True)
    target.run(fused_scale_bias, torch.ones_like(grad_out), 2.0, bias).backward(grad_out)
    assert bias.grad is not None
    assert bias.grad.item() == 10_000


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded"])
def test_identity_leaves_every_layout_as_it_is(target: Target, generator: torch.Generator, layout: str) -> None:
    x = lay(draw(generator, (2, 8, 3, 5), torch.float32, target.device), layout)
    assert_same(target.run(fused_scale_bias_clamp, x, 1, 0, -1e30, 1e30), x)
