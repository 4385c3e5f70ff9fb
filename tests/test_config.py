"""show_config: right on a whole machine, on one with nothing, on broken ones, and on ones that no test machine is."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupyfused import _cache, _config
from cupyfused._config import ABSENT, ERROR, KERNEL, NOT_INSTALLED, REFERENCE, TORCH_ON_CUDA, Driver, Facts, Gpu, Library

H200 = Gpu("NVIDIA H200", 90, "sm_90")
GTX_1080 = Gpu("GTX 1080", 61, None, "CompileError: [cuda12]")
NO_DRIVER = Driver(problem="there is no NVIDIA driver")
NO_LIBRARY = Library(problem=NOT_INSTALLED)
NO_CUPY = {"cupy": NO_LIBRARY, "cupy_distributions": (), "nvrtc": NO_LIBRARY}
WHOLE = Facts(
    versions=(("Python", "3.13.1, Linux x86_64"), ("cupyfused", "1.0"), ("NumPy", "2.2.0")),
    torch=Library("2.14.1+cu130", (13, 0)),
    cupy=Library("14.2.0", (13, 0)),
    cupy_distributions=("cupy-cuda13x",),
    nvrtc=Library("13.0", (13, 0)),
    driver=Driver((13, 0), (H200,)),
    cache="/cache/.cache/cupyfused",
    cache_is_writable=True,
)


def paths(facts: Facts) -> dict[str, str]:
    return {route.arrays: route.path for route in _config.diagnose(facts).routes}


def python(code: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh Python, away from the repository's folder."""
    command = [sys.executable, *flags, "-c", code]
    variables = os.environ | {"COLUMNS": "300"} | environment
    return subprocess.run(command, env=variables, cwd=Path(sys.executable).parent, text=True, capture_output=True, timeout=120)


# ---- judging: pure ------------------------------------------------------------------------------------------------------


def test_a_whole_machine_runs_kernels_and_needs_nothing() -> None:
    diagnosis = _config.diagnose(WHOLE)
    assert diagnosis.kernels_run
    assert diagnosis.remedies == ()
    assert list(paths(WHOLE)) == ["torch.Tensor on CPU", TORCH_ON_CUDA, "cupy.ndarray", "numpy.ndarray"]
    assert list(paths(WHOLE).values()) == [REFERENCE, KERNEL, KERNEL, REFERENCE]
    assert "sm_90" in diagnosis.routes[1].reason


CASES = {
    # what is different from a whole machine: the remedy's words, its command, PyTorch's path on CUDA, CuPy's path
    "no driver": ({"driver": NO_DRIVER}, "no NVIDIA driver", "install an NVIDIA driver", ABSENT, ABSENT),
    "old driver": ({"driver": Driver((11, 4), (H200,))}, "11.4 at most", "install a newer NVIDIA driver", ERROR, ERROR),
    "hidden GPU": ({"driver": Driver((13, 0), problem="offers no GPU")}, "no GPU", "CUDA_VISIBLE_DEVICES", ABSENT, ABSENT),
    "old GPU": ({"driver": Driver((13, 0), (GTX_1080,))}, "GTX 1080", "CompileError: [cuda12]", ERROR, ERROR),
    "no torch": ({"torch": NO_LIBRARY}, "PyTorch: not installed", "pip install 'cupyfused[torch]'", ABSENT, KERNEL),
    "broken torch": ({"torch": Library(problem="OSError: no")}, "OSError: no", "--force-reinstall torch", ABSENT, KERNEL),
    "old torch": ({"torch": Library("2.5.1", (13, 0))}, "2.5.1 is too old", "--upgrade 'cupyfused[torch]'", ERROR, KERNEL),
    "torch of a CPU": ({"torch": Library("2.14.1+cpu")}, "built without CUDA", "pytorch.org/whl/cu130", ABSENT, KERNEL),
    "torch newer than the driver": (
        {"driver": Driver((12, 8), (H200,)), "cupy": Library("14.2.0", (12, 9)), "cupy_distributions": ("cupy-cuda12x",)},
        "PyTorch is built for CUDA 13.0, the driver runs CUDA 12.8 at most",
        "https://download.pytorch.org/whl/cu126",
        ERROR,
        KERNEL,
    ),
    "no cupy": (NO_CUPY, "CuPy: not installed", "pip install 'cupyfused[cuda13]'", ERROR, ABSENT),
    "broken cupy": (
        {"cupy": Library(problem="ImportError: no"), "nvrtc": NO_LIBRARY},
        *("ImportError: no", "pip uninstall -y cupy-cuda13x && pip install 'cupyfused[cuda13]'", ERROR, ABSENT),
    ),
    "old cupy": (
        {"cupy": Library("13.6.0", (13, 0))},
        *("13.6.0 is too old", "pip uninstall -y cupy-cuda13x && pip install 'cupyfused[cuda13]'", ERROR, ERROR),
    ),
    "cupy newer than the driver": (
        {"driver": Driver((12, 8), (H200,)), "torch": Library("2.8.0+cu128", (12, 8))},
        "CuPy is built for CUDA 13.0, the driver runs CUDA 12.8 at most",
        "pip uninstall -y cupy-cuda13x && pip install 'cupyfused[cuda12]'",
        ERROR,
        ERROR,
    ),
    "other majors": (
        {"cupy": Library("14.2.0", (12, 9)), "cupy_distributions": ("cupy-cuda12x",)},
        "PyTorch 2.14.1+cu130 is built for CUDA 13, CuPy 14.2.0 for CUDA 12",
        "pip uninstall -y cupy-cuda12x && pip install 'cupyfused[cuda13]'",
        KERNEL,
        KERNEL,
    ),
    "two cupys": (
        {"cupy_distributions": ("cupy-cuda12x", "cupy-cuda13x")},
        "cupy-cuda12x, cupy-cuda13x",
        "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupyfused[cuda13]'",
        ERROR,
        ERROR,
    ),
    "no NVRTC": ({"nvrtc": Library(problem="OSError: no")}, "NVRTC: OSError: no", "pip install 'cupyfused[cuda13]'", ERROR, ERROR),
    "no cache": ({"cache_is_writable": False}, "cupyfused is not writable", "CUPYFUSED_CACHE_DIR", KERNEL, KERNEL),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing_gets_its_remedy(case: str) -> None:
    change, problem, command, torch_path, cupy_path = CASES[case]
    facts = WHOLE._replace(**change)  # type: ignore[arg-type]
    diagnosis = _config.diagnose(facts)
    (remedy,) = diagnosis.remedies
    assert problem in remedy.problem
    assert command in remedy.command
    assert paths(facts)[TORCH_ON_CUDA] == torch_path
    assert paths(facts)["cupy.ndarray"] == cupy_path
    assert diagnosis.kernels_run == (case in ("no torch", "torch of a CPU", "other majors", "no cache"))


def test_a_path_that_is_shut_says_why() -> None:
    facts = WHOLE._replace(nvrtc=Library(problem="OSError: libnvrtc"), torch=NO_LIBRARY)
    reasons = {route.arrays: route.reason for route in _config.diagnose(facts).routes}
    assert reasons["cupy.ndarray"] == "NVRTC: OSError: libnvrtc"
    assert reasons[TORCH_ON_CUDA] == "PyTorch: not installed"


@pytest.mark.parametrize("driver", [NO_DRIVER, Driver((12, 4), (H200,)), Driver((13, 1), (H200,))])
def test_a_machine_with_nothing_names_the_cupy_of_its_driver(driver: Driver) -> None:
    facts = WHOLE._replace(torch=NO_LIBRARY, driver=driver, **NO_CUPY)  # type: ignore[arg-type]
    commands = [remedy.command for remedy in _config.diagnose(facts).remedies]
    assert f"pip install 'cupyfused[cuda{driver.cuda[0] if driver.cuda else 13}]'" in commands
    assert paths(facts)["numpy.ndarray"] == REFERENCE


# ---- the driver ---------------------------------------------------------------------------------------------------------


def fake_driver(count: int, code: int = 0) -> SimpleNamespace:
    """Answer as libcuda does; there is no way to make a context, so an attempt at one would fail."""

    def put(pointer: Any, value: Any) -> int:
        pointer._obj.value = value
        return 0

    def name(buffer: Any, length: int, device: Any) -> int:
        buffer.value = f"GPU number {device.value}".encode()
        return 0

    return SimpleNamespace(
        cuDriverGetVersion=lambda version: put(version, 12080),
        cuInit=lambda flags: code,
        cuDeviceGetCount=lambda number: put(number, count),
        cuGetErrorString=lambda code, text: put(text, b"no CUDA-capable device is detected" if code == 100 else None),
        cuDeviceGet=put,
        cuDeviceGetName=name,
        cuDeviceGetAttribute=lambda value, attribute, device: put(value, {75: 8, 76: 6 + 3 * device.value}[attribute]),
    )


def put_driver(monkeypatch: pytest.MonkeyPatch, driver: SimpleNamespace | None) -> None:
    """Let the driver's library be this one; None: it is not found."""
    real = ctypes.CDLL

    def load(name: Any, *arguments: Any, **keywords: Any) -> Any:
        if name not in ("libcuda.so.1", "nvcuda.dll"):
            return real(name, *arguments, **keywords)
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_the_driver_names_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    put_driver(monkeypatch, fake_driver(2))
    found = _config._ask_driver(lambda capability: f"sm_{capability}")
    assert found == Driver((12, 8), (Gpu("GPU number 0", 86, "sm_86"), Gpu("GPU number 1", 89, "sm_89")))


def test_a_gpu_that_nvrtc_does_not_know_has_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def architecture(capability: int) -> str:
        raise ValueError("too old")

    put_driver(monkeypatch, fake_driver(1))
    assert _config._ask_driver(architecture).gpus == (Gpu("GPU number 0", 86, None, "ValueError: too old"),)


def test_a_driver_without_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    put_driver(monkeypatch, fake_driver(0, code=100))
    found = _config._ask_driver(None)
    assert found.gpus == ()
    assert "no CUDA-capable device is detected" in found.problem


def test_no_driver_is_a_remedy_and_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put_driver(monkeypatch, None)
    _config.show_config()
    printed = capsys.readouterr().out
    assert "install an NVIDIA driver: https://www.nvidia.com/drivers" in printed
    assert "CUDA kernels cannot run here" in printed


# ---- this machine -------------------------------------------------------------------------------------------------------


def test_what_is_installed_is_found() -> None:
    facts = _config.gather()
    assert dict(facts.versions)["NumPy"] == importlib.metadata.version("numpy")
    assert facts.cache == str(_cache.folder())
    assert facts.cache_is_writable
    if facts.torch.version:
        assert facts.torch.version.startswith(importlib.metadata.version("torch").partition("+")[0])
    for name in facts.cupy_distributions:
        assert facts.cupy.version == importlib.metadata.version(name)


def test_a_cache_that_is_no_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("CUPYFUSED_CACHE_DIR", str(blocked))
    assert not _config.gather().cache_is_writable


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path:
        raise RuntimeError("there is no home")

    monkeypatch.setattr(_cache, "folder", folder)
    facts = _config.gather()
    assert facts.cache == "RuntimeError: there is no home"
    assert not facts.cache_is_writable


def test_importing_it_imports_nothing_heavy() -> None:
    done = python("import sys, cupyfused._config\nprint({'torch', 'cupy', 'rich', 'matplotlib'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "cupy", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
"""


def test_absent_libraries_name_their_commands() -> None:
    done = python(f"{HIDE}import cupyfused\ncupyfused.show_config()", "-W", "error")
    assert done.returncode == 0, done.stderr
    assert "pip install 'cupyfused[torch]'" in done.stdout
    assert "pip install 'cupyfused[cuda1" in done.stdout
    assert "NumPy's own operations" in done.stdout


BROKEN = {
    "ImportError": "raise ImportError('libbroken.so: not found')",
    "OSError": "raise OSError('libbroken.so: not found')",
    "a warning": "import warnings\nwarnings.warn('libbroken.so: not found')\nraise ImportError('libbroken.so: not found')",
    "nothing in it": "libbroken = 'not found'",
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_libraries_do_not_break_it(how: str, tmp_path: Path) -> None:
    for name in ("torch", "cupy", "rich"):
        (tmp_path / f"{name}.py").write_text(BROKEN[how])
    done = python("import cupyfused\ncupyfused.show_config()", "-W", "error", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "pip install --force-reinstall torch" in done.stdout
    assert "&& pip install 'cupyfused[cuda1" in done.stdout
    if how != "nothing in it":
        assert done.stdout.count("libbroken.so: not found") >= 4  # each among the versions and beside its remedy


def test_commands_stay_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    change = {"cupy_distributions": ("cupy-cuda12x", "cupy-cuda13x")}
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(_config, "gather", lambda: WHOLE._replace(**change))  # type: ignore[arg-type]
    _config.show_config()
    assert "    pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupyfused[cuda13]'\n" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu_no_context_is_made() -> None:
    code = (
        "import ctypes, cupyfused\ncupyfused.show_config()\ncuda = ctypes.CDLL('libcuda.so.1')\n"
        "active, flags = ctypes.c_int(), ctypes.c_uint()\n"
        "assert cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0\nassert not active.value"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "CUDA kernels run here." in done.stdout
