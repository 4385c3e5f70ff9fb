"""What every test stands on: the three targets, the gpu mark, fresh random numbers, poisoned outputs, a cache of its own."""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from targets import CUDA, HOST, REFERENCE, Target

from cupyfused import _kernel
from cupyfused.errors import CudaError

if TYPE_CHECKING:
    import torch

pytest.register_assert_rewrite(
    "checks",
    "contract_arrays",
    "contract_calls",
    "contract_compiled",
    "contract_gradients",
    "contract_transforms",
    "contract_values",
)

NO_DEVICE = "no CUDA device"
NO_NVRTC = "NVRTC comes with pip install 'cupyfused[cuda13]'"
collect_ignore_glob: list[str] = []
try:
    import torch as _torch
except ImportError:  # the pure tests run without it
    collect_ignore_glob += ["ops/*", "test_field_cases*.py", "test_gpu*.py", "test_graphs.py", "test_opinfo.py"]
    collect_ignore_glob += ["test_autocast.py", "test_distributed.py", "test_hostile.py", "test_pytorch.py", "test_training.py"]
else:
    _torch.set_num_threads(1)  # arrays are small; two workers of xdist would only wait for each other's threads


@functools.cache
def has_cuda() -> bool:
    """Whether the tests marked gpu can run."""
    return "torch" in sys.modules and bool(_torch.cuda.is_available())


@functools.cache
def has_nvrtc() -> bool:
    """Whether kernels can be compiled, which needs no GPU."""
    try:
        return _kernel.nvrtc_version() >= (12, 0)
    except CudaError:
        return False


# ---- the session --------------------------------------------------------------------------------------------------------

_own_cache = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-architecture", action="store_true", help="Compile every instance for every architecture.")


def pytest_configure(config: pytest.Config) -> None:
    # PyTorch warns of what its own clamp and jvp call inside, and 2.6 of what its gradcheck calls.
    for message in (".torch.jit", "Please use .torch.vmap"):
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products are refused in deterministic mode without it
    if hasattr(config, "workerinput"):
        return  # a worker of xdist inherits the folder of the session, so a kernel is built once for all of them
    folder = os.environ.get("CUPYFUSED_TEST_CACHE_DIR")  # kept from one session to the next; entries are named by their content
    if folder is None:
        folder = config.stash[_own_cache] = tempfile.mkdtemp(prefix="cupyfused-tests-")
    os.environ["CUPYFUSED_CACHE_DIR"] = folder


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(_own_cache, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))
        if item.name == "cupyfused._warmup.warmup" and not has_nvrtc():  # its doctest
            item.add_marker(pytest.mark.skip(reason=NO_NVRTC))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_DEVICE in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"gpu: {len(skipped)} tests skipped, {NO_DEVICE}")


# ---- fixtures -----------------------------------------------------------------------------------------------------------

_TARGETS = [
    pytest.param(REFERENCE, id="cpu reference"),
    pytest.param(HOST, id="host kernels"),
    pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=_TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Each place where a test body runs."""
    one: Target = request.param
    if one is HOST:
        monkeypatch.setattr("cupyfused._op.cpu_impl", "host")  # so that calls without impl= run the kernels too
    return one


@pytest.fixture
def nvrtc() -> None:
    """Skip a test that compiles where nothing can be compiled."""
    if not has_nvrtc():
        pytest.skip(NO_NVRTC)


@pytest.fixture
def generator() -> torch.Generator:
    """Numbers that are new in every run; pytest shows the seed of a test that fails."""
    seed = int(os.environ.get("CUPYFUSED_TEST_SEED") or secrets.randbits(31))
    print(f"CUPYFUSED_TEST_SEED={seed}")
    return _torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill whatever is allocated without values with NaN, or with 0xFF: an element that a kernel leaves out is seen."""
    monkeypatch.setattr(np, "empty", functools.partial(_filled, np.empty))
    if request.node.get_closest_marker("gpu"):
        cupy = pytest.importorskip("cupy")
        monkeypatch.setattr(cupy, "empty", functools.partial(_filled, cupy.empty))
    if "torch" not in sys.modules:
        yield
        return
    assert _torch.utils.deterministic.fill_uninitialized_memory
    _torch.use_deterministic_algorithms(True)
    yield
    _torch.use_deterministic_algorithms(False)


def _filled(empty: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    array = empty(*arguments, **keywords)
    if isinstance(array, np.ndarray):
        if not array.dtype.hasobject:
            ctypes.memset(array.ctypes.data, 0xFF, array.nbytes)
    elif array.nbytes:
        array.data.memset_async(0xFF, array.nbytes)
    return array
