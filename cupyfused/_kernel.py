"""From CUDA text to a kernel: one source string -> NVRTC -> cubin -> cupy.RawModule. The only place that compiles.

A kernel is compiled when it is first needed, once for an op, its dtypes and its layout class; shapes, strides and the values of
numbers are parameters. The cubin is kept by `_cache`, keyed by everything that could change it.

What only compiling and loading need is imported there: `import cupyfused` imports this file, and they take 20 ms.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import CompileError, CudaError

if TYPE_CHECKING:
    from ._source import Variant

__all__ = ["architecture", "cache_key", "compile_cubin", "cubin", "import_cupy", "load", "nvrtc_version", "raw_kernel"]


# ---- CuPy and NVRTC -----------------------------------------------------------------------------------------------------


@functools.cache
def import_cupy() -> ModuleType:
    """Import CuPy, or say what is missing and which command brings it."""
    if "CUPY_CACHE_DIR" not in os.environ and not _can_make("~/.cupy"):
        # `import cupy` makes this folder and dies where it cannot (FileNotFoundError or PermissionError in CuPy 14.2).
        import shutil
        import tempfile

        os.environ["CUPY_CACHE_DIR"] = private = tempfile.mkdtemp(prefix="cupyfused-cupy-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # a broken CuPy raises whatever its own imports raise
        raise CudaError(
            f"cupyfused needs CuPy to compile and launch CUDA kernels, and it cannot be imported: {type(error).__name__}: {error}. "
            "Install it for your CUDA: pip install 'cupyfused[cuda13]' (or [cuda12]); `python -m cupyfused doctor` says more."
        ) from error


def _can_make(folder: str) -> bool:
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder at all
        path = Path(folder).expanduser()
        path.mkdir(exist_ok=True)
        return os.access(path, os.W_OK)
    return False


def _nvrtc() -> Any:
    return import_cupy().cuda.nvrtc


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC that compiles kernels here."""
    try:
        major, minor = _nvrtc().getVersion()
    except CudaError:
        raise
    except Exception as error:
        raise CudaError(
            f"NVRTC, the run-time compiler of CUDA, cannot be loaded: {' '.join(str(error).split())}. "
            "Install it beside CuPy: pip install 'cupyfused[cuda13]' (or [cuda12], matching the CuPy wheel)."
        ) from error
    return major, minor


def architecture(capability: int) -> str:
    """Return the cubin architecture for a GPU of this compute capability (90 for 9.0).

    A cubin runs on every later minor of its major, so a GPU that this NVRTC does not know takes its older sister's code.
    """
    version = nvrtc_version()
    known = [arch for arch in _nvrtc().getSupportedArchs() if arch // 10 == capability // 10 and arch <= capability]
    if not known:
        newest = 13 if capability >= 75 else 12
        raise CompileError(
            f"NVRTC {version[0]}.{version[1]} compiles nothing for this GPU of compute capability {capability / 10}. "
            f"Install the CuPy wheel of a CUDA that does: pip install 'cupyfused[cuda{newest}]'."
        )
    return f"sm_{max(known)}"


def _options(arch: str) -> tuple[str, ...]:
    return (f"--gpu-architecture={arch}", "--std=c++17", "--generate-line-info")


def compile_cubin(variant: Variant, arch: str) -> bytes:
    """Compile with NVRTC; needs no GPU and no driver. Forward takes 0.1 to 0.2 s, backward 0.3 to 0.5, on a slow core."""
    nvrtc = _nvrtc()
    options = _options(arch)
    program = nvrtc.createProgram(variant.source(), f"{variant.kernel_name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program)) + b"\0"  # CuPy 14.2 takes the last byte, a zero, for the end of a string
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        major, minor = nvrtc_version()
        raise CompileError(
            f"{variant.describe()} does not compile for {arch} with NVRTC {major}.{minor}, options {' '.join(options)}:\n{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def cache_key(variant: Variant, arch: str) -> str:
    """Return the name of the kernel's machine code in the cache."""
    import hashlib

    text = "\0".join((variant.source(), *_options(arch), str(nvrtc_version())))
    return hashlib.sha256(text.encode()).hexdigest() + ".cubin"


def cubin(variant: Variant, arch: str) -> bytes:
    """Return the kernel's machine code, from the cache if it is there."""
    from . import _cache

    key = cache_key(variant, arch)
    code = _cache.load(key)
    if code is None:
        code = compile_cubin(variant, arch)
        _cache.store(key, code)
    return code


# ---- loading ------------------------------------------------------------------------------------------------------------

_loaded: dict[tuple[Variant, int], Any] = {}
_loading = threading.Lock()


def load(variant: Variant, device: int) -> Any:
    """Return the `cupy.RawKernel` of a variant on a device, which must be current; compiled at most once a process."""
    kernel = _loaded.get((variant, device))
    if kernel is None:
        with _loading:  # 16 threads may come at once: one compiles, the others find it
            kernel = _loaded.get((variant, device))
            if kernel is None:
                kernel = _loaded[variant, device] = raw_kernel(variant, device)
    return kernel


def raw_kernel(variant: Variant, device: int) -> Any:
    """Load a kernel through `cupy.RawModule`, from our cubin, or with CUPYFUSED_COMPILER=cupy from the text.

    CuPy's own compilation is the public way behind ours. It costs an empty program's compilation a process (50 ms), caches by
    a key of its own, and flushes float32 subnormals to zero (`-ftz=true`, which it adds after our options).
    """
    import tempfile

    cupy = import_cupy()
    if os.environ.get("CUPYFUSED_COMPILER") == "cupy":
        return cupy.RawModule(code=variant.source(), options=("--std=c++17",)).get_function(variant.kernel_name)
    code = cubin(variant, architecture(int(cupy.cuda.Device(device).compute_capability)))
    descriptor, path = tempfile.mkstemp(suffix=".cubin")  # RawModule takes a path, and the cache may have none to offer
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
        kernel = cupy.RawModule(path=path).get_function(variant.kernel_name)
        _ = kernel.attributes  # loads the module now, while the file is there
        return kernel
    finally:
        Path(path).unlink(missing_ok=True)
