"""Device memory: pools, peaks, leaks, and more elements than 31 bits count. On a GPU."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same
from layouts import draw, lay
from torch import Tensor

from cupyfused import fused_scale_bias, fused_scale_bias_clamp

pytestmark = pytest.mark.gpu

BILLION = 1 << 30


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """Start and end with nothing held that is not in use."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def needs(gigabytes: int) -> None:
    """Skip where the device has less memory free."""
    if torch.cuda.mem_get_info()[0] < gigabytes * BILLION:
        pytest.skip(f"needs {gigabytes} GiB of device memory")


# ---- pools, peaks, leaks --------------------------------------------------------------------------------------------------


def test_tensors_take_nothing_from_the_pool_of_cupy(generator: torch.Generator) -> None:
    """Two pools would each hold what the other needs: results, gradients and workspaces come from PyTorch's."""
    cupy = pytest.importorskip("cupy")
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(pool.malloc)
    try:
        for shapes in (((64, 33, 512), (33, 1), (33, 1)), ((3_001, 64), (64,), (64,)), ((40_009,), (), ())):
            leaves = [draw(generator, shape, torch.float32, "cuda").requires_grad_() for shape in shapes]
            fused_scale_bias_clamp(*leaves, -1.0, 1.0).sum().backward()
        assert pool.total_bytes() == 0
    finally:
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


def peak_of(run: Callable[[], Any]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    assert kept is not None
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced"])
@pytest.mark.parametrize("shape", [(256, 1, 1), (1024,), (), (64, 256, 64, 64)], ids=str)
def test_peak_memory_is_what_goes_in_and_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    """Inputs, outputs, gradients, and at most 1 % more: no hidden copy of a strided input, no intermediate, a small workspace."""
    whole = (64, 256, 16, 1024) if shape == (1024,) else (64, 256, 64, 64)
    x = lay(torch.randn(whole, device="cuda", dtype=dtype), layout).requires_grad_()
    scale, bias = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    grad_out = lay(torch.randn(whole, device="cuda", dtype=dtype), layout)

    def run() -> list[Tensor]:
        y = fused_scale_bias_clamp(x, scale, bias, -1.0, 1.0)
        return [y, *torch.autograd.grad(y, (x, scale, bias), grad_out)]

    inside = [x, scale, bias, grad_out]
    new = [x, x, scale, bias]  # of the sizes of y and the gradients
    nbytes = sum(one.numel() * one.element_size() for one in (*inside, *new))
    assert peak_of(run) <= sum(one.numel() * one.element_size() for one in new) + nbytes // 100


def test_ten_thousand_calls_leave_nothing_behind(generator: torch.Generator) -> None:
    """Failed ones included: a dtype without a kernel is refused before anything is exported."""
    leaves = [draw(generator, shape, torch.float32, "cuda").requires_grad_() for shape in ((64, 33, 64), (33, 1), (33, 1))]
    eight_bits = leaves[0].detach().to(torch.float8_e4m3fn)

    def run(times: int) -> tuple[int, int]:
        for _ in range(times):
            torch.autograd.grad(fused_scale_bias_clamp(*leaves, -1.0, 1.0).sum(), leaves)
            with pytest.raises(TypeError, match="float8"):
                fused_scale_bias_clamp(eight_bits, 2.0, 1.0, -1.0, 1.0)
        gc.collect()
        torch.cuda.synchronize()
        time.sleep(0.5)  # PyTorch's backward thread lets go of the last gradients after the call has returned
        return torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    allocated, resident = run(1_000)
    after = run(10_000)
    assert after[0] == allocated
    assert after[1] - resident < 20_000  # KiB


@pytest.mark.parametrize("shape", [(1080, 1920, 3), (0, 8)], ids=str)
def test_ten_thousand_calls_on_cupy_arrays_leave_nothing_behind(shape: tuple[int, ...]) -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.full(shape, 3, dtype="uint8")

    def run(times: int) -> tuple[int, int]:
        for _ in range(times):
            fused_scale_bias(x, 0.5, 1.0)
        gc.collect()
        return cupy.get_default_memory_pool().used_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    used, resident = run(1_000)
    after = run(10_000)
    assert after[0] == used
    assert after[1] - resident < 20_000  # KiB


def test_sums_of_four_million_ones() -> None:
    """4,194,304 a channel: exact in bfloat16 and float32, infinite in half, and only at the final rounding."""
    for dtype, expected in ((torch.float16, float("inf")), (torch.bfloat16, 4_194_304.0), (torch.float32, 4_194_304.0)):
        x = torch.ones(64, 8, 256, 256, device="cuda", dtype=dtype)
        scale, bias = (torch.ones(8, 1, 1, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
        found = torch.autograd.grad(fused_scale_bias(x, scale, bias), (scale, bias), torch.ones_like(x))
        for gradient in found:
            assert_same(gradient, torch.full_like(scale, expected).detach())


# ---- more than 2**31 elements ---------------------------------------------------------------------------------------------

HUGE = [2**31 - 1, 2**31, 2**31 + 1, 2**31 + 4096, 2**32 + 1]
PIECE = 1 << 27


def pieces(count: int) -> Iterator[slice]:
    """Cut a range into pieces that no 31-bit index leaves."""
    for begin in range(0, count, PIECE):
        yield slice(begin, min(begin + PIECE, count))


def edges(count: int) -> Iterator[slice]:
    """Where an index that is too narrow goes wrong: the first elements, the last, and those around 2**31 and 2**32."""
    for place in (0, count, 2**31, 2**32):
        if place - 2048 < count:
            yield slice(max(place - 2048, 0), min(place + 2048, count))


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_huge_forward(count: int, dtype: torch.dtype) -> None:
    needs(count * dtype.itemsize * 2 // BILLION + 4)
    x = torch.empty(count, dtype=dtype, device="cuda")
    _ = x.random_(0, 256) if dtype is torch.uint8 else x.normal_()
    numbers: tuple[Any, ...] = (3, 7, 16, 235) if dtype is torch.uint8 else (1.5, 0.25, -1.0, 1.0)
    scale, bias, low, high = numbers
    y = fused_scale_bias_clamp(x, *numbers)
    for edge in edges(count):
        if dtype is torch.uint8:
            assert_same(y[edge], (x[edge] * scale + bias).clamp(low, high))
        else:
            assert_close(y[edge], (x[edge].double() * scale + bias).clamp(low, high))
    for piece in pieces(count):
        assert torch.equal(y[piece], fused_scale_bias_clamp(x[piece], *numbers)), f"elements {piece}"


@pytest.mark.parametrize("count", [2**31 + 4096, 2**32 + 1])
def test_huge_backward(count: int) -> None:
    """Single parameters: two sums over everything, and a gradient of full size."""
    needs(count * 10 // BILLION + 4)
    x = torch.empty(count, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    grad_out = torch.empty_like(x).normal_()
    scale, bias = (torch.tensor(value, dtype=torch.bfloat16, device="cuda", requires_grad=True) for value in (1.5, 0.25))
    grad_x, grad_scale, grad_bias = torch.autograd.grad(fused_scale_bias(x, scale, bias), (x, scale, bias), grad_out)
    for part in (*edges(count), *pieces(count)):
        assert torch.equal(grad_x[part], grad_out[part] * 1.5), f"elements {part}"
    sums = torch.zeros(2, dtype=torch.float64, device="cuda")
    for piece in pieces(count):
        g = grad_out[piece].double()
        sums += torch.stack([(g * x.detach()[piece]).sum(), g.sum()])
    assert_close(grad_scale, sums[0], torch.float32, added=count)
    assert_close(grad_bias, sums[1], torch.float32, added=count)


def test_huge_rows_times_columns() -> None:
    """Each extent is small, their product is not: column sums over two million rows, a row sum for each of them."""
    rows, columns = 2**21 + 1, 1024
    needs(24)
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    grad_out = torch.empty_like(x).normal_()
    scale = torch.randn(columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(rows, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = fused_scale_bias(x, scale, bias)
    grad_x, grad_scale, grad_bias = torch.autograd.grad(y, (x, scale, bias), grad_out)
    sums = torch.zeros(columns, dtype=torch.float64, device="cuda")
    with torch.no_grad():
        for begin in range(0, rows, PIECE // columns):
            part = slice(begin, begin + PIECE // columns)
            g = grad_out[part].double()
            sums += (g * x[part]).sum(0)
            assert_close(y[part], x[part].double() * scale + bias[part])
            assert_close(grad_x[part], g * scale)
            assert_close(grad_bias[part], g.sum(1, keepdim=True), torch.float32, added=columns)
    assert_close(grad_scale, sums, torch.float32, added=rows)


def test_few_elements_far_apart() -> None:
    """The count is small, the last offset is beyond 31 bits, in elements and in bytes."""
    needs(20)
    for count, dtype in ((2**31 + 64, torch.uint8), (2**32 + 64, torch.bfloat16)):
        base = torch.empty(count, dtype=dtype, device="cuda")
        _ = base.random_(0, 256) if dtype is torch.uint8 else base.normal_()
        far = base[:: 2**20]
        numbers = (3, 7) if dtype is torch.uint8 else (1.5, 0.25)
        for x in (far, base[-1000:], base.as_strided((3, 5), (2**29, 2**28 + 3))):
            assert_same(fused_scale_bias(x, *numbers), fused_scale_bias(x.contiguous(), *numbers))
        if dtype is torch.bfloat16:
            near = [far.contiguous().requires_grad_(), far.detach().requires_grad_()]
            grads = [
                torch.autograd.grad(fused_scale_bias(leaf, 1.5, 0.25), leaf, g)[0] for leaf, g in zip(near, (far.contiguous(), far))
            ]
            assert_same(*grads)
        rest = base[1 :: 2**20].clone()
        expected = fused_scale_bias(far, *numbers)
        fused_scale_bias(far.clone(), *numbers, out=far)
        assert_same(far.contiguous(), expected)
        assert_same(base[1 :: 2**20].contiguous(), rest)


def test_a_few_elements_expanded_to_billions() -> None:
    """The result is the only large array; gradients of what was small are sums of 2**32 terms."""
    needs(34)
    side = 2**16
    row = torch.arange(side, device="cuda").to(torch.uint8).expand(side, side)
    column = torch.arange(side, device="cuda").to(torch.uint8).view(side, 1)
    y = fused_scale_bias(row, 3, column)
    for part in (0, 1, side // 2 - 1, side // 2, side - 1):
        assert_same(y[part], row[0] * 3 + column[part])
    del y
    x = torch.randn(side + 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(side, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = fused_scale_bias(x, 1.5, bias)
    grads = torch.autograd.grad(y, (x, bias), torch.ones((), device="cuda", dtype=torch.bfloat16).expand(y.shape))
    assert_close(grads[0], torch.full_like(x, 1.5 * side).double())
    assert_close(grads[1], torch.full_like(bias, side + 1).double())
