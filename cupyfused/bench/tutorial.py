"""The ways that tutorials teach: a C++/CUDA extension, CuPy's RawKernel behind DLPack, and a loop in C++."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .. import _kernel
from ..errors import CompileError
from .cases import BOUNDS

__all__ = ["build_extension", "build_loop", "build_textbook", "no_extension", "no_loop"]

BLOCK = 256
_DECLARATIONS = """
torch::Tensor forward(torch::Tensor x, torch::Tensor scale, torch::Tensor bias, double min_val, double max_val);
std::vector<torch::Tensor> backward(torch::Tensor grad_out, torch::Tensor x, torch::Tensor scale, torch::Tensor bias,
                                    double min_val, double max_val);
"""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _text(name: str) -> str:
    return resources.files("cupyfused.bench").joinpath(name).read_text(encoding="ascii")


def _function(forward: Forward, backward: Backward) -> Callable[..., Tensor]:
    """Return the `apply` of an `autograd.Function` with this forward and backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, scale, bias)
            return forward(x, scale, bias)

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
            return backward(grad_out.contiguous(), *ctx.saved_tensors)

    return Function.apply  # type: ignore[no-any-return]


# ---- a C++/CUDA extension -----------------------------------------------------------------------------------------------


def no_extension() -> str:
    """Say why `load_inline` cannot build here, "" where it can."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not Path(cpp_extension.CUDA_HOME, "bin", "nvcc").exists():
        return "there is no nvcc; it comes with the CUDA toolkit"
    if not cpp_extension.is_ninja_available():
        return "load_inline needs ninja on PATH: pip install ninja"
    return no_loop()


def build_extension(scratch: Path) -> Callable[..., Tensor]:
    """Build the tutorial's kernels with nvcc; a second build in the same folder finds the first."""
    from torch.utils import cpp_extension

    folder = scratch / "extension"
    folder.mkdir(exist_ok=True)
    extension = cpp_extension.load_inline(
        name="cupyfused_bench_extension",
        cpp_sources=_DECLARATIONS,
        cuda_sources=_text("tutorial.cu") + _text("extension.cu"),
        functions=["forward", "backward"],
        build_directory=str(folder),
    )
    return _function(
        lambda x, scale, bias: extension.forward(x, scale, bias, *BOUNDS),
        lambda grad_out, x, scale, bias: tuple(extension.backward(grad_out, x, scale, bias, *BOUNDS)),
    )


# ---- CuPy's RawKernel behind DLPack -------------------------------------------------------------------------------------


def build_textbook(scratch: Path) -> Callable[..., Tensor]:
    """Exchange every array through DLPack at each call, as CuPy's and PyTorch's guides do."""
    cupy = _kernel.import_cupy()
    kernels = {name: cupy.RawKernel(_text("tutorial.cu"), name) for name in ("tutorial_forward", "tutorial_backward")}
    bounds = tuple(numpy.float32(bound) for bound in BOUNDS)

    def launch(name: str, inputs: tuple[Tensor, ...], results: int) -> tuple[Tensor, ...]:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            arrays = [cupy.from_dlpack(one.detach()) for one in inputs]
            written = [cupy.empty_like(arrays[0]) for _ in range(results)]
            count = arrays[0].size
            kernels[name](((count + BLOCK - 1) // BLOCK,), (BLOCK,), (*arrays, *written, *bounds, numpy.int64(count)))
            return tuple(torch.utils.dlpack.from_dlpack(one) for one in written)

    def forward(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return launch("tutorial_forward", (x, scale, bias), 1)[0]

    def backward(grad_out: Tensor, x: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        grad_x, grad_scale, grad_bias = launch("tutorial_backward", (grad_out, x, scale, bias), 3)
        return grad_x, grad_scale.sum(), grad_bias

    return _function(forward, backward)


# ---- a loop in C++ ------------------------------------------------------------------------------------------------------


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))), None)


def no_loop() -> str:
    """Say why the loop cannot be built here, "" where it can."""
    return "" if _compiler() else "there is no C++ compiler on PATH (g++, clang++ or $CXX)"


def build_loop(scratch: Path) -> Callable[[Any, Any, Any], Any]:
    """Build the loop with the C++ compiler of this machine; it takes NumPy arrays."""
    built = scratch / "loop.so"
    command = [_compiler() or "c++", "-O3", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(built)]
    done = subprocess.run(command, input=_text("loop.cpp"), text=True, capture_output=True)
    if done.returncode:
        raise CompileError(f"loop.cpp does not build with {command[0]}:\n{done.stderr}")
    loop = ctypes.CDLL(str(built)).loop
    pointer, number = ctypes.c_void_p, ctypes.c_float
    loop.argtypes = [pointer, number, pointer, pointer, number, number, ctypes.c_longlong]
    loop.restype = None

    def call(x: Any, scale: Any, bias: Any) -> Any:
        y = numpy.empty_like(x)
        loop(x.ctypes.data, float(scale), bias.ctypes.data, y.ctypes.data, *BOUNDS, x.size)
        return y

    return call
