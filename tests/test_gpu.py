"""Streams, threads, CUDA graphs, devices and what is compiled. On a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import assert_agree, assert_close, assert_same
from layouts import LAYOUTS, draw, lay
from torch import Tensor

from cupyfused import _kernel, fused_scale_bias, fused_scale_bias_clamp

pytestmark = pytest.mark.gpu

ROUNDS = 200
SLOW = 5_000_000  # cycles, some milliseconds: whatever is launched on another stream has long ended
SIZE = 1025
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")


def slow_fill(values: Tensor, value: float) -> None:
    """Write on the current stream, late."""
    torch.cuda._sleep(SLOW)
    values.fill_(value)


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    """A stream that does not wait for the default one; everything before it has ended."""
    fused_scale_bias(torch.ones(SIZE, device="cuda", requires_grad=True), 2.0, 1.0).sum().backward()  # compiled and loaded
    torch.cuda.synchronize()
    yield torch.cuda.Stream()
    torch.cuda.synchronize()


# ---- streams --------------------------------------------------------------------------------------------------------------


def test_forward_follows_the_current_stream(stream: torch.cuda.Stream) -> None:
    x = torch.full((SIZE,), -1.0, device="cuda")
    results = []
    with torch.cuda.stream(stream):
        for k in range(1, ROUNDS + 1):
            slow_fill(x, k)
            results.append(fused_scale_bias(x, 2.0, 1.0))
    stream.synchronize()
    assert [float(y.min()) for y in results] == [2 * k + 1 for k in range(1, ROUNDS + 1)]
    assert [float(y.max()) for y in results] == [2 * k + 1 for k in range(1, ROUNDS + 1)]


@pytest.mark.parametrize("inside", [False, True], ids=["called outside", "called on the stream"])
def test_backward_is_ordered_after_its_incoming_gradient(stream: torch.cuda.Stream, inside: bool) -> None:
    """It runs in a thread of autograd, on the stream of its forward, and waits for where it was called from."""
    x = torch.linspace(-1, 1, SIZE, device="cuda", requires_grad=True)
    scale = torch.full((), 2.0, device="cuda", requires_grad=True)
    grad_out = torch.full((SIZE,), -1.0, device="cuda")
    torch.cuda.synchronize()
    results = []
    with torch.cuda.stream(stream):
        y = fused_scale_bias(x, scale, 1.0)
    stream.synchronize()
    for k in range(1, ROUNDS + 1):
        with torch.cuda.stream(stream if inside else torch.cuda.default_stream()):
            slow_fill(grad_out, k / 256)
            results.append(torch.autograd.grad(y, (x, scale), grad_out, retain_graph=True))
    torch.cuda.synchronize()
    for k, (grad_x, grad_scale) in enumerate(results, 1):
        assert bool((grad_x == 2 * k / 256).all())
        assert_close(grad_scale, k / 256 * x.detach().double().sum(), added=SIZE)


def test_the_stream_of_cupy_is_neither_used_nor_changed_for_tensors(stream: torch.cuda.Stream) -> None:
    cupy = pytest.importorskip("cupy")
    x = torch.full((SIZE,), -1.0, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    results = []
    with cupy.cuda.Stream(non_blocking=True) as other, torch.cuda.stream(stream):
        for k in range(1, ROUNDS + 1):
            slow_fill(x.detach(), k)
            y = fused_scale_bias(x, 2.0, 1.0)
            results.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
            assert cupy.cuda.get_current_stream().ptr == other.ptr
            assert torch.cuda.current_stream() == stream
    stream.synchronize()
    for k, (y, grad_x) in enumerate(results, 1):
        assert bool((y == 2 * k + 1).all())
        assert bool((grad_x == 2).all())


def test_cupy_arrays_follow_the_stream_of_cupy(stream: torch.cuda.Stream) -> None:
    """While PyTorch's current stream is another."""
    cupy = pytest.importorskip("cupy")
    x = cupy.full(SIZE, -1, dtype="float32")
    fused_scale_bias(x, 2.0, 1.0)
    other = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    results = []
    with other, torch.cuda.stream(stream):
        for k in range(1, ROUNDS + 1):
            with torch.cuda.stream(torch.cuda.ExternalStream(other.ptr)):
                torch.cuda._sleep(SLOW)
            x.fill(k)
            results.append(fused_scale_bias(x, 2.0, 1.0))
    other.synchronize()
    for k, y in enumerate(results, 1):
        assert bool((y == 2 * k + 1).all())


def test_workspaces_are_not_reused_by_another_stream(stream: torch.cuda.Stream, generator: torch.Generator) -> None:
    """A sum's scratch memory is given back while its kernels are still waiting; what takes it must come after them."""
    x = draw(generator, (64, 33, 512), torch.float32, "cuda")
    scale = draw(generator, (33, 1), torch.float32, "cuda").requires_grad_()
    grad_out = draw(generator, x.shape, torch.float32, "cuda")
    expected = torch.autograd.grad(fused_scale_bias(x, scale, 1.0), scale, grad_out)[0]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        with torch.cuda.stream(stream):
            y = fused_scale_bias(x, scale, 1.0)
            torch.cuda._sleep(SLOW)
            results.append(torch.autograd.grad(y, scale, grad_out)[0])
        _ = [torch.full((1 << 14,), 1e9, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    for gradient in results:
        assert_same(gradient, expected)


# ---- threads --------------------------------------------------------------------------------------------------------------


def test_sixteen_threads_with_shapes_of_their_own() -> None:
    """Forward and backward, each on its own stream or on the default one; launches let other threads in between."""
    barrier, failures = threading.Barrier(16), []

    def work(place: int) -> None:
        try:
            generator = torch.Generator().manual_seed(place)
            shapes = ((place + 2, 3, 17 + 8 * place), (3, 1), (17 + 8 * place,))
            leaves = [draw(generator, shape, torch.float64, "cuda").requires_grad_() for shape in shapes]
            expected = torch.autograd.grad((leaves[0] * leaves[1] + leaves[2]).clamp(-1, 1).square().sum(), leaves)
            torch.cuda.synchronize()
            barrier.wait()
            with torch.cuda.stream(torch.cuda.Stream() if place % 2 else torch.cuda.default_stream()):
                for _ in range(50):
                    y = fused_scale_bias_clamp(*leaves, -1.0, 1.0)
                    for gradient, right in zip(torch.autograd.grad(y.square().sum(), leaves), expected):
                        assert_agree(gradient, right, added=10_000)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------------


# A leaf's accumulation node belongs to the stream of its first backward, here that of the warm-up; PyTorch says so of any op.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_graphs_replay_with_new_data(generator: torch.Generator) -> None:
    """Forward and backward, with sums that take a workspace; nothing of the captured call's data is kept."""
    leaves = [draw(generator, shape, torch.float32, "cuda").requires_grad_() for shape in ((64, 33, 512), (33, 1), (33, 1))]
    grad_out = draw(generator, leaves[0].shape, torch.float32, "cuda")
    low = torch.full((), -1.0, device="cuda")

    def step() -> list[Tensor]:
        y = fused_scale_bias_clamp(*leaves, low, 1.0)
        return [y, *torch.autograd.grad(y, leaves, grad_out)]

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for k in range(5):
        with torch.no_grad():
            for leaf in (*leaves, grad_out):
                leaf.copy_(draw(generator, leaf.shape, torch.float32, "cuda"))
            low.fill_(-0.25 * k)
        graph.replay()
        for replayed, right in zip(captured, step(), strict=True):
            assert_same(replayed.detach(), right.detach())


# ---- synchronisation ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch says at every switch that it does not see everything
def test_no_call_waits_for_the_device(generator: torch.Generator) -> None:
    """Scalars as numbers, as tensors on the GPU and on the CPU; signatures seen before and new ones."""
    scalars: list[Any] = [1.5, torch.full((), 1.5, device="cuda"), torch.full((), 1.5)]
    data = [draw(generator, (rows, 3, 64), torch.float64, "cuda").requires_grad_() for rows in (5, 7, 5)]
    bias = draw(generator, (3, 1), torch.float64, "cuda").requires_grad_()
    expected = [(x * 1.5 + bias).clamp(-1.5, 1.5) for x in data]
    fused_scale_bias_clamp(data[0], 1.5, bias, -1.5, 1.5).sum().backward()  # compiled and loaded
    results = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in data:
            for scalar in scalars:
                y = fused_scale_bias_clamp(x, scalar, bias, -scalar, scalar)
                results.append((y.detach(), *torch.autograd.grad(y.sum(), (x, bias))))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for k, (y, grad_x, grad_bias) in enumerate(results):
        x, right = data[k // 3], expected[k // 3]
        assert_agree(y, right.detach())
        for gradient, of in zip((grad_x, grad_bias), torch.autograd.grad(right.sum(), (x, bias), retain_graph=True)):
            assert_agree(gradient, of)


# ---- what is compiled -----------------------------------------------------------------------------------------------------


def test_numbers_and_shapes_compile_nothing(generator: torch.Generator) -> None:
    for width in (17, 1):  # packets, and fewer elements than one has
        x = draw(generator, (3, width), torch.float32, "cuda")
        fused_scale_bias_clamp(x, 1.5, 0.25, -1.0, 1.0)
    before = len(_kernel._loaded)
    for k in range(50):
        fused_scale_bias_clamp(x, 1.5 + k, 0.25 * k, -1.0 - k, 1.0 + 2**k)
        fused_scale_bias_clamp(draw(generator, (k + 1, 3 * k + 2), torch.float32, "cuda"), 1.5, 0.25, -1.0, 1.0)
    assert len(_kernel._loaded) == before


def test_layouts_compile_a_bounded_number_of_kernels(generator: torch.Generator) -> None:
    """Forward and backward over 200 shapes and layouts at random: the instances are counted in tens, and soon all there."""
    seen = [len(_kernel._loaded)]
    names = list(LAYOUTS)
    for _ in range(200):
        whole = torch.randint(1, 20, (3,), generator=generator).tolist()
        picks = torch.randint(1 << 16, (6,), generator=generator).tolist()
        shapes = [[1 if picks[k] >> dim & 1 else extent for dim, extent in enumerate(whole)] for k in range(3)]
        leaves = [
            lay(draw(generator, shape, torch.float32, "cuda"), names[picks[3 + k] % len(names)]).requires_grad_()
            for k, shape in enumerate(shapes)
        ]
        fused_scale_bias_clamp(*leaves, -1.0, 1.0).sum().backward()
        seen.append(len(_kernel._loaded))
    assert seen[-1] - seen[0] <= 60
    assert seen[-1] - seen[100] <= (seen[-1] - seen[0]) // 2 + 5


# ---- devices --------------------------------------------------------------------------------------------------------------


def test_devices_that_differ_are_an_error_that_names_both(generator: torch.Generator) -> None:
    x, per_channel = draw(generator, (2, 3, 5), torch.float32), draw(generator, (3, 1), torch.float32)
    for arguments in ((x.cuda(), per_channel, 1.0), (x, per_channel.cuda(), 1.0), (x, 2.0, torch.ones((), device="cuda"))):
        with pytest.raises(ValueError, match=r"(cuda:0.*cpu|cpu.*cuda:0)"):
            fused_scale_bias(*arguments)


def test_a_zero_dim_parameter_on_the_cpu_gets_its_gradient_there(generator: torch.Generator) -> None:
    x = draw(generator, (5, 7), torch.float64, "cuda")
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.5, 0.25))
    fused_scale_bias(x, scale, bias).sum().backward()
    assert scale.grad is not None
    assert bias.grad is not None
    assert scale.grad.device.type == bias.grad.device.type == "cpu"
    assert_agree(scale.grad, x.sum().cpu())
    assert bias.grad.item() == 35


@two_devices
def test_the_second_device(generator: torch.Generator) -> None:
    """First on one, then on the other, with the current device elsewhere and unchanged, also by errors."""
    for index in (0, 1, 0, 1):
        leaves = [
            draw(generator, shape, torch.float64, f"cuda:{index}").requires_grad_() for shape in ((5, 300, 16), (300, 1), (16,))
        ]
        for current in (0, 1):
            torch.cuda.set_device(current)
            y = fused_scale_bias(*leaves)
            found = torch.autograd.grad(y.square().sum(), leaves)
            assert y.device.index == index
            assert torch.cuda.current_device() == current
            assert torch.empty(1, device="cuda").device.index == current
            for gradient, right in zip(found, torch.autograd.grad((leaves[0] * leaves[1] + leaves[2]).square().sum(), leaves)):
                assert_agree(gradient, right, added=5_000)
            with pytest.raises(ValueError, match="cuda:1"):
                fused_scale_bias(leaves[0], torch.ones(16, device=f"cuda:{1 - index}"), 1.0)
            assert torch.cuda.current_device() == current
    torch.cuda.set_device(0)
