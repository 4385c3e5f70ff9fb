"""The demo and the command line: what they learn, what they print, the picture, and what they say when something is missing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cupyfused import __main__, _config, fused_scale_bias_clamp
from cupyfused._config import Driver, Gpu
from cupyfused.errors import OperandError

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
image = pytest.importorskip("PIL.Image")
demo = pytest.importorskip("cupyfused._demo")

SMALL = demo.Size(frames=4, extent=32, features=8)
MAX_PICTURE_BYTES = 200_000
TOLERANCE = 1e-5  # relative, of losses that differ by the rounding of float32 only


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.SIZES, "cpu", SMALL)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = _config.gather()._replace(driver=Driver(problem="there is no NVIDIA driver"))
    monkeypatch.setattr(_config, "gather", lambda: facts)


@pytest.fixture(scope="module")
def scene() -> Any:
    return demo.open_scene(torch.device("cpu"))


# ---- the clip -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, *demo.SIZES.values()], ids=str)
def test_the_clip_is_views_of_the_photograph(size: Any, scene: Any) -> None:
    frames, extent, _ = size
    clip = demo.as_clip(scene.noisy, frames, extent)
    assert clip.data_ptr() == scene.noisy.data_ptr()
    assert clip.shape == (frames, 3, extent, extent)
    assert clip.stride(1) == 1  # colours lie beside each other
    rows, columns, _ = scene.noisy.shape
    down, right = (rows - extent) // (frames - 1), (columns - extent) // (frames - 1)
    for k, frame in enumerate(clip):
        crop = scene.noisy[k * down : k * down + extent, k * right : k * right + extent].permute(2, 0, 1)
        assert torch.equal(frame, crop)


def test_frames_of_the_demo_overlap() -> None:
    for size in (demo.Size(12, 80, 12), demo.SIZES["cuda"]):
        assert (600 - size.extent) // (size.frames - 1) < size.extent  # a photograph of 600 rows


# ---- training -----------------------------------------------------------------------------------------------------------


def test_both_runs_learn_the_same(scene: Any) -> None:
    composed, fused = (demo.train(operator, scene, SMALL, 25) for operator in (demo.composed, fused_scale_bias_clamp))
    assert all(map(math.isfinite, fused.losses))
    assert fused.losses == pytest.approx(composed.losses, rel=TOLERANCE)
    assert fused.losses[0] == pytest.approx(demo.NOISE**2, rel=0.1)  # an untrained denoiser leaves all the noise
    assert fused.losses[-1] < 0.75 * fused.losses[0]
    clean = scene.clean[demo.FACE]
    assert demo.psnr(fused.denoised, clean) > demo.psnr(scene.noisy[demo.FACE], clean) + 1


def test_the_kernels_own_text_learns_the_same(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = demo.train(demo.composed, scene, SMALL, 4)
    monkeypatch.setattr("cupyfused._op.cpu_impl", "host")
    assert demo.train(fused_scale_bias_clamp, scene, SMALL, 4).losses == pytest.approx(composed.losses, rel=TOLERANCE)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x, scale, bias, low, high: torch.clamp(x * scale - bias, low, high), id="sign"),
        pytest.param(lambda x, scale, bias, low, high: x * scale + bias, id="no clamp"),
    ],
)
def test_a_wrong_operator_would_be_seen(wrong: Callable[..., Any], scene: Any) -> None:
    right = demo.train(demo.composed, scene, SMALL, 10)
    assert demo.train(wrong, scene, SMALL, 10).losses != pytest.approx(right.losses, rel=100 * TOLERANCE)


def test_training_repeats_and_leaves_the_generator_alone(scene: Any) -> None:
    state = torch.get_rng_state()
    first, second = (demo.train(demo.composed, scene, SMALL, 3).losses for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


# ---- the command --------------------------------------------------------------------------------------------------------


def test_the_demo_prints_both_runs_and_saves_a_picture(
    no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return fused_scale_bias_clamp(*arguments)

    monkeypatch.setattr(demo, "fused_scale_bias_clamp", counted)
    threads, output = torch.get_num_threads(), tmp_path / "a" / "folder"
    assert __main__.main(["demo", "--steps", "12", "--output", str(output)]) == 0
    assert len(calls) == 3 * (1 + 12 + 1)  # three normalisations: once to warm up, at each step, once for the picture
    assert torch.get_num_threads() == threads
    (picture,) = output.iterdir()
    with image.open(picture) as opened:
        assert opened.format == "PNG"
        assert min(opened.size) > 500
    assert picture.stat().st_size < MAX_PICTURE_BYTES
    printed = capsys.readouterr().out
    assert "Running on the CPU (no usable GPU" in printed
    for expected in ("composed", "fused", "median step", "n/a on a CPU", "Largest difference", str(picture)):
        assert expected in printed


def test_the_picture_of_the_whole_demo_is_small(scene: Any, tmp_path: Path) -> None:
    noisy = demo.Run([0.02, 0.01], [0.1, 0.1], None, scene.noisy[demo.FACE].clamp(0, 1))  # noise is what compresses worst
    demo.save_picture(tmp_path / "picture.png", scene, {"composed": noisy, "fused": noisy}, 0.0)
    assert (tmp_path / "picture.png").stat().st_size < MAX_PICTURE_BYTES


WITHOUT_GPU = [("cuda", "there is no NVIDIA driver"), ("cuda:0", "--device cpu"), ("mps", "cuda:1"), ("cuda:x", "cuda:1")]


@pytest.mark.parametrize(("device", "words"), WITHOUT_GPU)
def test_a_device_that_is_not_there_is_refused(
    device: str, words: str, no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["demo", "--steps", "1", "--device", device, "--output", str(tmp_path)]) == 1
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_made_is_told(no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    assert __main__.main(["demo", "--steps", "1", "--output", str(blocked)]) == 1
    assert "a file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torch", "matplotlib", "rich"])
def test_a_missing_package_names_its_command(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(f"raise ImportError('there is no {name} here')")
    command = [sys.executable, "-c", "import sys\nfrom cupyfused.__main__ import main\nsys.exit(main(['demo']))"]
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=variables, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 1
    assert "pip install 'cupyfused[demo,torch]'" in done.stderr
    assert f"there is no {name} here" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 0
    printed = capsys.readouterr().out
    assert "demo" in printed
    assert "doctor" in printed


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["demo", "--steps", "many"], ["dance"]])
def test_arguments_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(arguments)
    assert arguments[-1] in capsys.readouterr().err


def whole_machine(gpus: int) -> _config.Facts:
    """Return the facts of a machine where everything is installed."""
    version = (13, 0)
    library = _config.Library("14.2.0", version)
    gpu = Gpu("NVIDIA H200", 90, "sm_90")
    driver = Driver(version, (gpu,) * gpus) if gpus else Driver(problem="there is no NVIDIA driver")
    facts = _config.gather()._replace(torch=library, cupy=library, cupy_distributions=("cupy-cuda13x",), nvrtc=library)
    return facts._replace(driver=driver)


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_doctor_exits_by_whether_kernels_run(
    gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = whole_machine(gpus)
    monkeypatch.setattr(_config, "gather", lambda: facts)
    assert __main__.main(["doctor"]) == (0 if gpus else 1)
    assert ("NVIDIA H200" in capsys.readouterr().out) == bool(gpus)


def test_where_kernels_run_the_demo_takes_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = whole_machine(2)
    monkeypatch.setattr(_config, "gather", lambda: facts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device.index}")
    assert demo.choose_device("auto")[0] == torch.device("cuda", 0)
    device, told = demo.choose_device("cuda:1")
    assert device == torch.device("cuda", 1)
    assert "GPU number 1" in told
    assert "sm_90" in told
    with pytest.raises(OperandError, match="2 GPUs"):
        demo.choose_device("cuda:2")


@pytest.mark.gpu
def test_the_demo_runs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(demo.SIZES, "cuda", SMALL)
    assert __main__.main(["demo", "--steps", "5", "--device", "cuda", "--output", str(tmp_path)]) == 0
    assert "MiB" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 1
