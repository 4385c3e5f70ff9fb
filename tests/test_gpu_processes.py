"""What happens once in a process: first calls, imports, caches, environment variables. On a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import assert_same
from processes import run_python, sample, start_python

pytestmark = pytest.mark.gpu

# Calls of each kind with gradients, compared with what is exact.
CALL = """
import torch
from cupyfused import fused_scale_bias, fused_scale_bias_clamp
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.linspace(-3, 3, 6 * 127).view(6, 127).to("cuda", dtype).requires_grad_()
    bias = torch.linspace(-1, 1, 127).to("cuda", dtype).requires_grad_()
    y = fused_scale_bias_clamp(x, 1.5, bias, -2.0, 2.0)
    right = (x.double() * 1.5 + bias.double()).clamp(-2, 2)
    torch.testing.assert_close(y.double(), right, rtol=torch.finfo(dtype).eps / 2, atol=1e-6)
    fused_scale_bias(x, 1.5, bias).backward(torch.full_like(x, 0.5))
    assert (x.grad == 0.75).all() and (bias.grad == 3).all()
print("right")
"""


def test_first_backward_of_a_process() -> None:
    """It runs in a thread of autograd, which has no CUDA context of its own yet."""
    code = """
        import torch
        from cupyfused import fused_scale_bias
        x = torch.linspace(-3, 3, 1025, device="cuda", requires_grad=True)
        fused_scale_bias(x, 1.5, 0.25).backward(torch.linspace(1, 2, 1025, device="cuda"))
        assert torch.equal(x.grad, torch.linspace(1, 2, 1025, device="cuda") * 1.5)
        print("right")
    """
    assert "right" in run_python(code)


@pytest.mark.parametrize(
    "variable",
    [{}, {"CUPYFUSED_COMPILER": "cupy"}, {"CUPYFUSED_LAUNCH": "rawkernel"}, {"CUPYFUSED_DEBUG": "1"}],
    ids=["default", "RawModule(code)", "RawKernel", "debug"],
)
def test_every_way_to_compile_and_launch_gives_the_same_numbers(tmp_path: Path, variable: dict[str, str]) -> None:
    path = tmp_path / "results.pt"
    run_python(
        f"import torch, processes; torch.save(processes.sample('cuda'), {str(path)!r})",
        CUPY_CACHE_DIR=str(tmp_path / "cupy"),
        **variable,
    )
    for result, right in zip(torch.load(path), sample("cuda"), strict=True):
        assert_same(result, right)


@pytest.mark.parametrize(
    "imports",
    ["cupyfused, torch", "torch, cupyfused", "cupy, torch, cupyfused", "torch, cupy, cupyfused", "cupyfused, cupy, torch"],
)
def test_imports_in_any_order(imports: str) -> None:
    """PyTorch brings a CUDA of its own, CuPy finds another: whichever comes first, both work."""
    assert "right" in run_python(f"import {imports}\n{CALL}")


def test_no_toolkit_is_looked_for(tmp_path: Path) -> None:
    """Neither CUDA_HOME nor a compiler on PATH; an empty cache, so that everything is compiled."""
    printed = run_python(CALL, CUDA_HOME=None, CUDA_PATH=None, PATH="/nonexistent", CUPYFUSED_CACHE_DIR=str(tmp_path / "cache"))
    assert "right" in printed


def test_first_call_with_an_empty_cache_is_no_wait(tmp_path: Path) -> None:
    """Measured: a third of a second. Headers that are searched for, or a compiler that is started, would show."""
    code = """
        import time, torch, cupy, cupyfused
        x = torch.linspace(-3, 3, 1024, device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        cupyfused.fused_scale_bias_clamp(x, 1.5, 0.25, -1.0, 1.0)
        torch.cuda.synchronize()
        print(time.perf_counter() - begin)
    """
    assert float(run_python(code, CUPYFUSED_CACHE_DIR=str(tmp_path / "cache"))) < 3


NOTHING_COMPILES = """
from cupyfused import _kernel
def refuse(*arguments):
    raise AssertionError("compiled again")
_kernel.compile_cubin = refuse
"""


@pytest.mark.parametrize("name", ["cache", "Zwischenspeicher für µ 缓存"])
def test_a_second_process_compiles_nothing(tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / name)
    assert "right" in run_python(CALL, CUPYFUSED_CACHE_DIR=folder)
    assert "right" in run_python(NOTHING_COMPILES + CALL, CUPYFUSED_CACHE_DIR=folder)


def test_damaged_cubins_are_compiled_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert "right" in run_python(CALL, CUPYFUSED_CACHE_DIR=str(folder))
    entries = list(folder.glob("*.cubin"))
    assert entries
    for k, entry in enumerate(entries):
        content = entry.read_bytes()
        entry.write_bytes(content[: len(content) // 2] if k % 2 else content[:-9] + b"\0" * 9)
    assert "right" in run_python(CALL, CUPYFUSED_CACHE_DIR=str(folder))
    assert "right" in run_python(NOTHING_COMPILES + CALL, CUPYFUSED_CACHE_DIR=str(folder))


def test_eight_processes_begin_with_one_empty_cache(tmp_path: Path) -> None:
    processes = [start_python(CALL, {"CUPYFUSED_CACHE_DIR": str(tmp_path / "cache")}) for _ in range(8)]
    for process in processes:
        printed, errors = process.communicate(timeout=300)
        assert (process.returncode, printed.strip()) == (0, "right"), errors
    assert "right" in run_python(NOTHING_COMPILES + CALL, CUPYFUSED_CACHE_DIR=str(tmp_path / "cache"))


def test_a_home_that_is_no_folder_costs_one_warning(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    code = f"""
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    exec({CALL!r})
print(sum("CUPYFUSED_CACHE_DIR" in str(one.message) for one in caught))
"""
    printed = run_python(code, HOME=str(home), XDG_CACHE_HOME=None, CUPYFUSED_CACHE_DIR=None, CUPY_CACHE_DIR=None)
    assert printed.split() == ["right", "1"]


def test_fork_after_import() -> None:
    """Importing touches neither the runtime nor the driver: a child may use CUDA, and so may the parent after it."""
    code = f"""
import os, sys, torch, cupyfused
assert not torch.cuda.is_initialized()
child = os.fork()
exec({CALL!r})
sys.stdout.flush()
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    assert run_python(code).split() == ["right", "right"]


def test_a_cuda_tensor_never_falls_back_silently(tmp_path: Path) -> None:
    """A CuPy that cannot be imported is an error with the command that mends it; the reference runs when asked for by name."""
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart is missing')")
    code = """
        import torch, cupyfused
        x = torch.linspace(-1, 1, 5, device="cuda")
        try:
            cupyfused.fused_scale_bias(x, 2.0, 1.0)
        except cupyfused.CudaError as error:
            assert "libcudart is missing" in str(error) and "pip install" in str(error), error
            print("refused")
        assert torch.equal(cupyfused.fused_scale_bias(x, 2.0, 1.0, impl="reference"), x * 2 + 1)
        assert torch.equal(cupyfused.fused_scale_bias(x.cpu(), 2.0, 1.0), x.cpu() * 2 + 1)
    """
    assert "refused" in run_python(code, PYTHONPATH=str(tmp_path))


def test_debug_mode_names_the_kernel_that_failed() -> None:
    """Without it, an illegal access surfaces in whatever comes next."""
    code = """
        import os, cupy, cupyfused
        x = cupy.lib.stride_tricks.as_strided(cupy.ones(4, "f4"), (2,), (1 << 44,))
        try:
            cupyfused.fused_scale_bias_clamp(x, 2.0, 1.0, 0.0, 1.0)
        except cupyfused.CudaError as error:
            print(error, flush=True)
        os._exit(0)  # the context is lost: nothing can be given back
    """
    printed = run_python(code, CUPYFUSED_DEBUG="1")
    assert "fused_scale_bias_clamp_forward" in printed
    assert "blocks" in printed


def test_first_use_inside_a_capture_works_or_says_what_to_do(tmp_path: Path) -> None:
    """Loading a module may be refused while a stream captures; then ordinary calls, and a capture after them, still work."""
    code = """
        import torch, cupyfused
        def call(x):
            return cupyfused.fused_scale_bias_clamp(x, 2.0, 1.0, -3.0, 3.0)
        x = torch.linspace(-1, 1, 1025, device="cuda")
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = call(x)
            print("captured")
        except cupyfused.CudaError as error:
            assert "captur" in str(error), error
            print("refused")
            torch.cuda.synchronize()
            assert torch.equal(call(x), (x * 2 + 1).clamp(-3, 3))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = call(x)
        x.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, (x * 2 + 1).clamp(-3, 3))
    """
    assert run_python(code, CUPYFUSED_CACHE_DIR=str(tmp_path / "cache")).strip() in ("captured", "refused")


def test_the_interpreter_ends_quietly() -> None:
    """Calls in flight, threads and graphs alive at the end of a program: no message, no crash."""
    code = """
        import threading, torch, cupyfused
        x = torch.linspace(-1, 1, 1 << 20, device="cuda", requires_grad=True)
        kept = [cupyfused.fused_scale_bias(x, 2.0, 1.0) for _ in range(20)]
        thread = threading.Thread(target=lambda: kept[0].sum().backward())
        thread.start()
        thread.join()
    """
    process = start_python(code, {})
    printed, errors = process.communicate(timeout=300)
    assert (process.returncode, printed, errors) == (0, "", "")
