"""What is installed here, which path each kind of array takes, and what mends what is missing.

`gather` asks the machine, `diagnose` judges the answers and asks nothing, `show_config` prints both. None of them raises: they
are what one runs when something is broken.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

__all__ = ["Diagnosis", "Driver", "Facts", "Gpu", "Library", "diagnose", "gather", "show_config"]

KERNEL, REFERENCE, ERROR, ABSENT = "CUDA kernel", "reference expression", "CudaError", "no such arrays"
TORCH_ON_CUDA, NOT_INSTALLED, DRIVERS = "torch.Tensor on CUDA", "not installed", "https://www.nvidia.com/drivers"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h
Version = tuple[int, int]


class Library(NamedTuple):
    """PyTorch, CuPy or NVRTC: its version (None: it cannot be loaded, and `problem` says why) and its CUDA."""

    version: str | None = None
    cuda: Version | None = None
    problem: str = ""


class Gpu(NamedTuple):
    """A GPU; `architecture` is what NVRTC compiles for it (None: nothing, and `problem` says why)."""

    name: str
    capability: int  # 90 for 9.0
    architecture: str | None = None
    problem: str = ""


class Driver(NamedTuple):
    """The NVIDIA driver: the newest CUDA that it runs (None: there is no driver) and the GPUs that this process may use."""

    cuda: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


class Facts(NamedTuple):
    """What this machine and this Python have."""

    versions: tuple[tuple[str, str], ...]
    torch: Library
    cupy: Library
    cupy_distributions: tuple[str, ...]
    nvrtc: Library
    driver: Driver
    cache: str
    cache_is_writable: bool


class Route(NamedTuple):
    """Which path a call with this kind of array takes: KERNEL, REFERENCE, ERROR or ABSENT."""

    arrays: str
    path: str
    reason: str


class Remedy(NamedTuple):
    """Something missing or wrong, what mends it, and the libraries whose CUDA arrays no kernel can take before that."""

    problem: str
    command: str
    blocks: tuple[str, ...] = ("torch", "cupy")


class Diagnosis(NamedTuple):
    """The path of each kind of array, what is to be mended, and whether nothing keeps CUDA kernels from running."""

    routes: tuple[Route, ...]
    remedies: tuple[Remedy, ...]
    kernels_run: bool


def gather() -> Facts:
    """Ask this machine and this Python what they have; no CUDA context is made, and nothing raises."""
    from . import __version__, _cache, _kernel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that are imported only to be asked for their versions
        torch = _ask("torch", lambda: importlib.import_module("torch"), lambda torch: _parsed(torch.version.cuda))
        cupy = _ask("cupy", _kernel.import_cupy, lambda cupy: _split(cupy.cuda.runtime.runtimeGetVersion()))
        nvrtc, problem = _attempt(_kernel.nvrtc_version) if cupy.version else (None, "comes with CuPy")
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return Facts(
        versions=(("Python", python), ("cupyfused", __version__), ("NumPy", numpy.__version__)),
        torch=torch,
        cupy=cupy,
        cupy_distributions=_attempt(_cupy_distributions)[0] or (),
        nvrtc=Library(_dotted(nvrtc), nvrtc) if nvrtc else Library(problem=problem),
        driver=_ask_driver(_kernel.architecture if nvrtc else None),
        cache=" ".join(str(one) for one in _attempt(_cache.folder) if one),
        cache_is_writable=bool(_attempt(_cache.is_writable)[0]),
    )


def _attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return a result and "", or None and the words of the error."""
    try:
        return function(), ""
    except Exception as error:  # a broken library raises anything
        cause = error.__cause__ or error  # what cupyfused's own errors advise beyond it is said elsewhere here
        return None, " ".join(f"{type(cause).__name__}: {cause}".split())


def _ask(name: str, load: Callable[[], Any], cuda: Callable[[Any], Version | None]) -> Library:
    library, problem = _attempt(load)
    if library is None:
        is_absent = problem.startswith("ModuleNotFoundError") and f"{name!r}" in problem
        return Library(problem=NOT_INSTALLED if is_absent else problem)
    version, problem = _attempt(lambda: str(library.__version__))
    return Library(version, _attempt(lambda: cuda(library))[0], problem)


def _parsed(version: str | None) -> Version | None:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def _dotted(version: Version | None) -> str:
    return "none" if version is None else f"{version[0]}.{version[1]}"


def _split(number: int) -> Version:
    """Read CUDA's way of writing 13.2 as 13020."""
    return number // 1000, number % 1000 // 10


def _cupy_distributions() -> tuple[str, ...]:
    from importlib import metadata  # takes 40 ms, and `import cupyfused` imports this file

    names = {(one.metadata["Name"] or "").lower().replace("_", "-") for one in metadata.distributions()}
    return tuple(sorted(name for name in names if re.fullmatch(r"cupy(-cuda\d+x?|-rocm.*)?", name)))


def _ask_driver(architecture: Callable[[int], str] | None) -> Driver:
    """Ask the driver itself: that needs neither PyTorch nor CuPy, and makes no context."""
    cuda, _ = _attempt(lambda: ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"))
    if cuda is None:
        return Driver(problem="there is no NVIDIA driver")
    number, text = ctypes.c_int(), ctypes.c_char_p()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = _split(number.value)
    number.value = 0
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number))
    if code or not number.value:
        cuda.cuGetErrorString(code, ctypes.byref(text))
        return Driver(version, problem=f"the NVIDIA driver offers no GPU ({(text.value or b'it has none').decode()})")
    return Driver(version, tuple(_ask_gpu(cuda, index, architecture) for index in range(number.value)))


def _ask_gpu(cuda: Any, index: int, architecture: Callable[[int], str] | None) -> Gpu:
    device, major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    capability = 10 * major.value + minor.value
    compiled, problem = _attempt(lambda: architecture(capability)) if architecture else (None, "")
    return Gpu(name.value.decode(errors="replace"), capability, compiled, problem)


def diagnose(facts: Facts) -> Diagnosis:
    """Say which path each kind of array takes, and what mends what is missing, in the order in which to mend it."""
    remedies = (*_driver_remedies(facts), *_cupy_remedies(facts), *_torch_remedies(facts))
    if not facts.cache_is_writable:  # kernels are then compiled again in each process
        remedies += (Remedy(f"{facts.cache} is not writable", "set CUPYFUSED_CACHE_DIR to a folder of yours", blocks=()),)
    return Diagnosis(tuple(_routes(facts, remedies)), remedies, not any(remedy.blocks for remedy in remedies))


def _routes(facts: Facts, remedies: tuple[Remedy, ...]) -> Iterator[Route]:
    torch, cupy, composed = facts.torch, facts.cupy, "own operations, composed: kernels are for CUDA arrays"
    no_torch = "" if torch.version else f"PyTorch: {torch.problem}"
    no_cuda = "" if torch.cuda else f"PyTorch {torch.version} is built without CUDA"
    no_cupy = "" if cupy.version else f"CuPy: {cupy.problem}"
    no_gpu = "" if facts.driver.gpus else facts.driver.problem
    on_cuda = (TORCH_ON_CUDA, "torch", no_torch or no_cuda or no_gpu), ("cupy.ndarray", "cupy", no_cupy or no_gpu)
    yield Route("torch.Tensor on CPU", *((ABSENT, no_torch) if no_torch else (REFERENCE, f"PyTorch's {composed}")))
    for arrays, library, absent in on_cuda:
        obstacles = [remedy.problem for remedy in remedies if library in remedy.blocks]
        if absent or obstacles:
            yield Route(arrays, *((ABSENT, absent) if absent else (ERROR, obstacles[0])))
        else:
            architectures = ", ".join(sorted({str(gpu.architecture) for gpu in facts.driver.gpus}))
            yield Route(arrays, KERNEL, f"compiled by NVRTC {facts.nvrtc.version} for {architectures}")
    yield Route("numpy.ndarray", REFERENCE, f"NumPy's {composed}")


def _driver_remedies(facts: Facts) -> Iterator[Remedy]:
    driver = facts.driver
    if driver.cuda is None:
        yield Remedy(driver.problem, f"install an NVIDIA driver: {DRIVERS} (containers: docker run --gpus all)")
    elif driver.cuda < (12, 0):
        yield Remedy(f"the NVIDIA driver runs CUDA {_dotted(driver.cuda)} at most", f"install a newer NVIDIA driver: {DRIVERS}")
    elif not driver.gpus:
        yield Remedy(driver.problem, "unset CUDA_VISIBLE_DEVICES, and see what nvidia-smi says")
    for gpu in driver.gpus:
        if gpu.problem:
            yield Remedy(f"no kernel can be compiled for {gpu.name}", gpu.problem)


def _cupy_remedies(facts: Facts) -> Iterator[Remedy]:
    cupy, torch, running, wheels = facts.cupy, facts.torch, facts.driver.cuda, facts.cupy_distributions
    majors = [one[0] for one in (torch.cuda, running) if one]  # CuPy is best of PyTorch's CUDA, as far as the driver runs it
    wanted = max(12, min(13, *majors)) if majors else 13
    install = f"pip install 'cupyfused[cuda{wanted}]'"
    replace = f"pip uninstall -y {' '.join(wheels) or 'cupy'} && {install}"
    if len(wheels) > 1:  # they write the same files: uninstalling only the wrong one would break the right one
        yield Remedy(f"more than one CuPy is installed ({', '.join(wheels)}); keep cupy-cuda{wanted}x alone", replace)
    elif cupy.version is None:
        yield Remedy(f"CuPy: {cupy.problem}", install if cupy.problem == NOT_INSTALLED else replace)
    elif (_parsed(cupy.version) or (0, 0)) < (14, 0):
        yield Remedy(f"CuPy {cupy.version} is too old: 14 is the first to find NVRTC in its wheel", replace)
    elif cupy.cuda and running and 12 <= running[0] < cupy.cuda[0]:
        yield Remedy(f"CuPy is built for CUDA {_dotted(cupy.cuda)}, the driver runs CUDA {_dotted(running)} at most", replace)
    elif cupy.cuda and torch.cuda and cupy.cuda[0] not in (torch.cuda[0], wanted):
        problem = f"PyTorch {torch.version} is built for CUDA {torch.cuda[0]}, CuPy {cupy.version} for CUDA {cupy.cuda[0]}"
        yield Remedy(problem, replace, blocks=())
    if cupy.version is not None and facts.nvrtc.version is None:
        yield Remedy(f"NVRTC: {facts.nvrtc.problem}", install)


def _torch_remedies(facts: Facts) -> Iterator[Remedy]:
    torch, running = facts.torch, facts.driver.cuda
    wheels = "https://download.pytorch.org/whl/" + ("cu130" if running and running[0] > 12 else "cu126")
    replace = f"pip install --force-reinstall torch --index-url {wheels}"
    if torch.version is None:
        absent = torch.problem == NOT_INSTALLED
        mend = "pip install 'cupyfused[torch]'" if absent else "pip install --force-reinstall torch"
        yield Remedy(f"PyTorch: {torch.problem}", mend, blocks=() if absent else ("torch",))
    elif (_parsed(torch.version) or (0, 0)) < (2, 6):
        problem = f"PyTorch {torch.version} is too old: 2.6 is the oldest"
        yield Remedy(problem, "pip install --upgrade 'cupyfused[torch]'", blocks=("torch",))
    elif torch.cuda is None and facts.driver.gpus:
        yield Remedy(f"PyTorch {torch.version} is built without CUDA, and there is a GPU", replace, blocks=())
    elif torch.cuda and running and 12 <= running[0] < torch.cuda[0]:
        problem = f"PyTorch is built for CUDA {_dotted(torch.cuda)}, the driver runs CUDA {_dotted(running)} at most"
        yield Remedy(problem, f"install a newer NVIDIA driver: {DRIVERS}, or: {replace}", blocks=("torch",))


def _rows(facts: Facts) -> list[tuple[str, str]]:
    driver, wheels = facts.driver, "".join(f", {name}" for name in facts.cupy_distributions)
    gpus = [f"{gpu.name}, compute capability {gpu.capability / 10}, {gpu.architecture or 'no kernels'}" for gpu in driver.gpus]
    return [
        *facts.versions,
        ("PyTorch", facts.torch.version or facts.torch.problem),
        ("PyTorch's CUDA", _dotted(facts.torch.cuda)),
        ("CuPy", (facts.cupy.version or facts.cupy.problem) + wheels),
        ("CuPy's CUDA", _dotted(facts.cupy.cuda)),
        ("NVRTC", facts.nvrtc.version or facts.nvrtc.problem),
        ("NVIDIA driver", f"runs CUDA up to {_dotted(driver.cuda)}" if driver.cuda else "none"),
        *(("GPU", gpu) for gpu in gpus or ["none"]),
        ("kernel cache", f"{facts.cache} ({'' if facts.cache_is_writable else 'not '}writable)"),
    ]


def show_config() -> None:
    """Print what is installed here, which path each kind of array takes and why, and what mends what is missing.

    It never raises and makes no CUDA context; `python -m cupyfused doctor` prints the same.
    """
    facts = gather()
    diagnosis, write = diagnose(facts), _attempt(_rich_writer)[0] or _write_plain
    write("Installed", _rows(facts))
    write("Which path a call takes", diagnosis.routes)
    for problem, command, blocks in diagnosis.remedies:
        print(f"{'Missing' if blocks else 'Note'}: {problem}\n    {command}")
    print(f"CUDA kernels {'run here' if diagnosis.kernels_run else 'cannot run here: see what is missing above'}.")


def _write_plain(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    print("\n".join((title, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), "")))


def _rich_writer() -> Callable[[str, Sequence[tuple[str, ...]]], None]:
    from rich import box, console, table, text

    def write(title: str, rows: Sequence[tuple[str, ...]]) -> None:
        one = table.Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
        for row in rows:
            one.add_row(*(text.Text(cell, overflow="fold") for cell in row))  # Text: brackets are no markup
        console.Console().print(one)

    return write
