"""`impl="host"`: the kernels' own text, built by g++ and run on CPU memory. For tests; nothing falls back to it.

It takes the same plans and the same parameter bytes as a launch on a GPU, so that gradcheck, the contract and AddressSanitizer
see the code that a GPU will run. `CUPYFUSED_HOST_FLAGS` adds compiler flags, such as -fsanitize=address,undefined.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from . import _cache, _source
from ._launch import Buffer, Launcher
from ._plan import Backend
from .errors import CompileError, CudaError

__all__ = ["backend"]

# Fortified headers, which Ubuntu switches on, take a longjmp from one fiber to another for a broken stack and abort.
_FLAGS = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-x", "c++")
_MULTIPROCESSORS = 3  # few, so that small arrays already split into several blocks, and odd

_RUN = """
template <typename P> static P& parameters() { static P p; return p; }
template <typename P> static void run(void (*)(P), const void* bytes, unsigned grid_x, unsigned grid_y)
{
    memcpy((void*)&parameters<P>(), bytes, sizeof(P));
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
#ifdef FORWARD
            for (threadIdx.x = 0; threadIdx.x < BLOCK; ++threadIdx.x) KERNEL(parameters<P>());
#else
            host::body = [] { KERNEL(parameters<P>()); };
            host::run_block();
#endif
        }
}
template <typename P> static size_t size(void (*)(P)) { return sizeof(P); }
extern "C" void cupyfused_run(const void* bytes, unsigned grid_x, unsigned grid_y) { run(&KERNEL, bytes, grid_x, grid_y); }
extern "C" size_t cupyfused_parameter_bytes() { return size(&KERNEL); }
"""

_running = threading.Lock()  # the shim's fibers and shared memory are globals


@functools.cache
def _library(variant: _source.Variant) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        raise CudaError('impl="host" builds kernels with g++, which is not on PATH.')
    flags = (*_FLAGS, *os.environ.get("CUPYFUSED_HOST_FLAGS", "").split())
    shim, body = _source.cuda_text("host_shim.h"), variant.source()
    source = f"#define BLOCK {_source.BLOCK}\n{shim}\n#undef BLOCK\n{body}\n{_RUN}"
    name = hashlib.sha256("\0".join((source, *flags)).encode()).hexdigest() + ".so"
    folder = _cache.folder() / "host"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            done = subprocess.run([compiler, *flags, "-", "-o", str(built)], input=source, text=True, capture_output=True)
            if done.returncode:
                raise CompileError(f"{variant.describe()} does not build with g++:\n{done.stderr}")
            os.replace(built, path)
    return ctypes.CDLL(str(path))


def _launcher(variant: _source.Variant) -> Launcher:
    library = _library(variant)
    run = library.cupyfused_run
    run.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.cupyfused_parameter_bytes.restype = ctypes.c_size_t
    expected = library.cupyfused_parameter_bytes()

    def launch(grid: tuple[int, int], buffer: Buffer, stream: int) -> None:
        if buffer.size.value != expected:
            raise CudaError(f"{variant.describe()}: the parameter struct has {expected} bytes, {buffer.size.value} were packed")
        with _running:
            run(buffer.address, *grid)

    return launch


backend = Backend("host", _launcher, _MULTIPROCESSORS)
