"""Importing cupyfused on machines where something is missing or broken, each in a fresh process; operators compute right then."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = '''
import importlib.abc, importlib.machinery, sys


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands before all other finders: what it lists is not there, or raises when it is imported."""

    def __init__(self, **errors):
        self.errors = errors

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in self.errors:
            return None
        if self.errors[root] is None:
            raise ModuleNotFoundError(f"No module named {root!r}", name=root)
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise self.errors[module.__name__.partition(".")[0]]


def loaded(*names):
    return {name for name in names if any(module == name or module.startswith(name + ".") for module in sys.modules)}


def check_numpy():
    import numpy as np
    import cupyfused

    generator = np.random.default_rng()
    x, scale, bias = generator.uniform(1, 2, (3, 4)), generator.uniform(1, 2, 4), generator.uniform(1, 2, (3, 1))
    np.testing.assert_allclose(cupyfused.fused_scale_bias(x, scale, bias), x * scale + bias, rtol=1e-14)
    found = cupyfused.fused_scale_bias_clamp(x, scale, bias, 2.5, 4.0)
    np.testing.assert_allclose(found, np.clip(x * scale + bias, 2.5, 4.0), rtol=1e-14)
    assert cupyfused.fused_scale_bias(np.full(2, 3, dtype="uint8"), 0.5, 1).dtype == np.float32


def check_torch():
    import torch
    import cupyfused

    torch.set_num_threads(1)
    x, scale, bias = (torch.rand(shape, dtype=torch.float64).add(1).requires_grad_() for shape in ((3, 4), (4,), (3, 1)))
    for found, composed in (
        (cupyfused.fused_scale_bias(x, scale, bias), x * scale + bias),
        (cupyfused.fused_scale_bias_clamp(x, scale, bias, 2.5, 4.0), (x * scale + bias).clamp(2.5, 4.0)),
        (cupyfused.FusedScaleBias.apply(x, scale, bias), x * scale + bias),
        (cupyfused.FusedScaleBiasClamp.apply(x, scale, bias, 2.5, 4.0), (x * scale + bias).clamp(2.5, 4.0)),
    ):
        assert torch.allclose(found, composed, rtol=1e-12)  # torch.testing takes half a second to import
        grad_out = torch.rand_like(found) + 1
        for own, right in zip(*(torch.autograd.grad(y, (x, scale, bias), grad_out) for y in (found, composed))):
            assert own.shape == right.shape and torch.allclose(own, right, rtol=1e-12)


'''


def run(program: str, cwd: Path, unset: tuple[str, ...] = (), **environment: str) -> str:
    """Run a program in a fresh process where every warning is an error; return what it printed."""
    settings = {name: value for name, value in os.environ.items() if name not in unset} | environment
    text = PRELUDE + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], cwd=cwd, env=settings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module, exc_type=ImportError)


# ---- what an import may not do ------------------------------------------------------------------------------------------


def test_neither_import_nor_numpy_calls_load_torch_or_cupy(tmp_path: Path) -> None:
    program = """
        import cupyfused
        assert not loaded("torch", "cupy", "cupy_backends", "ml_dtypes"), loaded("torch", "cupy", "cupy_backends", "ml_dtypes")
        check_numpy()
        for name in cupyfused.__all__:
            if not name.startswith("Fused"):  # an autograd.Function cannot be made without torch
                getattr(cupyfused, name)
        assert not loaded("torch", "cupy"), loaded("torch", "cupy")
        try:
            cupyfused.no_such_name
        except AttributeError as error:
            assert "no_such_name" in str(error)
        else:
            raise AssertionError("a name that is not there was found")
    """
    run(program, tmp_path)
    assert not list(tmp_path.iterdir()), "an import writes nothing where it stands"


def test_an_import_loads_nothing_heavy(tmp_path: Path) -> None:
    """What only a compilation or a report needs is imported by it; much of Python itself takes tens of milliseconds."""
    program = """
        import sys, numpy
        before = set(sys.modules)
        import cupyfused
        print(*sorted(set(sys.modules) - before))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]  # without the prelude, which imports much itself
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    new = set(done.stdout.split())
    assert {"cupyfused", "cupyfused._plan"} <= new
    foreign = {name for name in new if name.partition(".")[0] not in {*sys.stdlib_module_names, "cupyfused", "numpy", "org"}}
    assert not foreign  # "org" is tried by the copy module, for Jython
    heavy = {"asyncio", "concurrent.futures", "email", "hashlib", "importlib.metadata", "importlib.resources", "logging"}
    assert not new & (heavy | {"multiprocessing", "shutil", "socket", "subprocess", "tempfile", "zipfile"})


def test_an_import_makes_no_folder(tmp_path: Path) -> None:
    run("import cupyfused; check_numpy()", tmp_path, CUPYFUSED_CACHE_DIR=str(tmp_path / "cache"), HOME=str(tmp_path / "home"))
    assert not list(tmp_path.iterdir())


def test_cpu_calls_need_neither_cuda_nor_cupy_and_live_on_after_a_fork(tmp_path: Path) -> None:
    needs("torch")
    program = """
        import os, warnings

        sys.meta_path.insert(0, Broken(cupy=RuntimeError("broken")))


        def check_in_a_child():
            if not hasattr(os, "fork"):
                return
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 for a fork of a process with threads
                child = os.fork()
            if child == 0:
                status = 1
                try:
                    check_numpy()
                    if "torch" in sys.modules:
                        check_torch()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0


        import cupyfused

        check_in_a_child()
        check_numpy()
        import torch

        check_torch()
        check_in_a_child()
        check_torch()
        assert not torch.cuda.is_initialized()
    """
    run(program, tmp_path)


# ---- what may be missing or broken --------------------------------------------------------------------------------------


def test_with_neither_torch_nor_cupy(tmp_path: Path) -> None:
    program = """
        sys.meta_path.insert(0, Broken(torch=None, cupy=None))
        check_numpy()
        import cupyfused
        from cupyfused import _kernel
        try:
            _kernel.import_cupy()
        except cupyfused.CudaError as error:
            assert "pip install 'cupyfused[cuda" in str(error) and "No module named 'cupy'" in str(error), error
        else:
            raise AssertionError("CuPy was found")
        try:
            cupyfused.FusedScaleBias
        except ImportError as error:
            assert "torch" in str(error)
        else:
            raise AssertionError("torch was found")
    """
    run(program, tmp_path)


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "OSError"])
def test_with_a_broken_cupy(tmp_path: Path, error: str) -> None:
    program = f"""
        sys.meta_path.insert(0, Broken(cupy={error}("libcudart is of another world"), torch=None))
        check_numpy()
        import cupyfused
        from cupyfused import _kernel
        try:
            _kernel.import_cupy()
        except cupyfused.CudaError as told:
            assert "libcudart is of another world" in str(told) and "pip install 'cupyfused[cuda" in str(told), told
        else:
            raise AssertionError("CuPy was found")
    """
    run(program, tmp_path)


def test_with_a_broken_torch(tmp_path: Path) -> None:
    run('sys.meta_path.insert(0, Broken(torch=OSError("libtorch is of another world"), cupy=None))\ncheck_numpy()', tmp_path)


def test_a_cuda_array_without_a_device_is_an_error_that_says_so(tmp_path: Path) -> None:
    needs("cupy")
    program = """
        import cupyfused


        class Elsewhere:
            def __dlpack_device__(self):
                return 2, 0

            def __dlpack__(self, **options):
                raise AssertionError("nobody can read it")


        for op, more in ((cupyfused.fused_scale_bias, ()), (cupyfused.fused_scale_bias_clamp, (0.5, 2.5))):
            try:
                op(Elsewhere(), 2.5, 1.5, *more)
            except cupyfused.CupyfusedError as error:
                assert "driver" in str(error) or "device" in str(error), error
            else:
                raise AssertionError("computed on no device")
        check_numpy()
    """
    run(program, tmp_path, CUDA_VISIBLE_DEVICES="-1")


# ---- homes --------------------------------------------------------------------------------------------------------------

HOMES = {
    "of a file": "/dev/null",
    "in a folder that takes none": "/proc/nobody",
    "empty": "",
    "of no such user": None,
    "relative": "somewhere",
}
HOME_VARIABLES = ("HOME", "XDG_CACHE_HOME", "CUPYFUSED_CACHE_DIR", "CUPY_CACHE_DIR")


@pytest.mark.skipif(os.name == "nt", reason="a home is found otherwise on Windows")
@pytest.mark.parametrize("home", HOMES)
def test_any_home(tmp_path: Path, home: str) -> None:
    """CuPy alone makes a folder in the home when it is imported, and dies where it cannot."""
    program = """
        import importlib.util, warnings

        if IS_UNKNOWN:
            import pwd

            def unknown(uid):
                raise KeyError(f"getpwuid(): uid not found: {uid}")

            pwd.getpwuid = unknown
        check_numpy()
        from cupyfused import _cache, _kernel

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that kernels stay in memory only
            _cache.store("key", b"value")
        assert _cache.load("key") in (None, b"value")
        if importlib.util.find_spec("cupy") is not None:
            assert _kernel.import_cupy().__name__ == "cupy"
    """
    value = HOMES[home]
    more = {} if value is None else {"HOME": value}
    run(program.replace("IS_UNKNOWN", repr(value is None)), tmp_path, unset=HOME_VARIABLES, **more)


# ---- versions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.99.0a0+git", "3.0.0"])
def test_versions_of_torch_that_are_not_out_yet(tmp_path: Path, version: str) -> None:
    """What PyTorch can do is probed, never read from its version."""
    needs("torch")
    run(f"import torch\ntorch.__version__ = torch.version.__version__ = {version!r}\ncheck_torch()\ncheck_numpy()", tmp_path)
