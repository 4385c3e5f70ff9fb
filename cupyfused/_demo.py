"""python -m cupyfused demo: a denoiser for a photograph, trained with composed PyTorch and with the fused operator.

The photograph comes with matplotlib. Noise is added to it, and a camera that moves over it gives a clip whose frames are
overlapping views of the photograph's memory. Both runs start from the same seed and see the same clip; they differ in one line.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.cbook
import matplotlib.image
import rich.console
import rich.progress
import rich.table
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from . import _config, fused_scale_bias_clamp
from .errors import CudaError, OperandError, message

__all__ = ["Denoiser", "Run", "Scene", "as_clip", "composed", "open_scene", "run", "train"]

SEED = 0
NOISE = 0.12  # standard deviation; intensities are between 0 and 1
LEARNING_RATE = 0.005
FACE = (slice(110, 290), slice(160, 340))  # rows and columns that the picture shows
TABLE_ROWS = 8
PICTURE = "denoised.png"

Operator = Callable[[Tensor, Tensor, Tensor, float, float], Tensor]


class Size(NamedTuple):
    """How large the clip and the model are; a GPU takes more before its memory and time show anything."""

    frames: int
    extent: int  # of a frame, in pixels
    features: int


SIZES = {"cpu": Size(frames=12, extent=80, features=12), "cuda": Size(frames=16, extent=256, features=32)}


class Scene(NamedTuple):
    """A photograph with noise and without, rows x columns x colours between 0 and 1."""

    noisy: Tensor
    clean: Tensor


class Run(NamedTuple):
    """What one training gave."""

    losses: list[float]
    seconds: list[float]  # of each step
    peak_memory: int | None  # bytes; None: not measured
    denoised: Tensor


def composed(x: Tensor, scale: Tensor, bias: Tensor, min_val: float, max_val: float) -> Tensor:
    """Compute in plain PyTorch what `fused_scale_bias_clamp` computes."""
    return torch.clamp(x * scale + bias, min_val, max_val)


class Normalise(nn.Module):
    """A learnable scale and bias for each channel, and a clamp to [-1, 1]."""

    def __init__(self, operator: Operator, channels: int, scale: float = 1.0, bias: float = 0.0):
        super().__init__()
        self.operator = operator
        self.scale = nn.Parameter(torch.full((channels, 1, 1), scale))
        self.bias = nn.Parameter(torch.full((channels, 1, 1), bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x, self.scale, self.bias, -1.0, 1.0)


class Denoiser(nn.Module):
    """Three convolutions that estimate the noise of an image, each behind a normalisation; at first they estimate none."""

    def __init__(self, operator: Operator, features: int):
        super().__init__()
        estimate = nn.Conv2d(features, 3, 3, padding=1, bias=False)
        nn.init.zeros_(estimate.weight)
        self.noise = nn.Sequential(
            Normalise(operator, 3, scale=2.0, bias=-1.0),  # [0, 1] to [-1, 1]
            nn.Conv2d(3, features, 3, padding=1, bias=False),
            Normalise(operator, features),
            nn.Conv2d(features, features, 3, padding=1, bias=False),
            Normalise(operator, features),
            estimate,
        )

    def forward(self, x: Tensor) -> Tensor:
        noise: Tensor = self.noise(x)
        return x - noise


def open_scene(device: torch.device) -> Scene:
    """Load matplotlib's photograph of Grace Hopper and add noise to a copy."""
    path = matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    clean = torch.tensor(matplotlib.image.imread(path), dtype=torch.float32) / 255
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(SEED))
    return Scene(clean.add(noise, alpha=NOISE).to(device), clean.to(device))


def as_clip(photo: Tensor, frames: int, extent: int) -> Tensor:
    """View a photograph, uncopied, as a clip of a camera that moves along its diagonal: frames x colours x rows x columns."""
    rows, columns, colours = photo.shape
    down, right = ((length - extent) // max(frames - 1, 1) for length in (rows, columns))
    strides = ((down * columns + right) * colours, 1, columns * colours, colours)
    return photo.as_strided((frames, colours, extent, extent), strides)


def train(operator: Operator, scene: Scene, size: Size, steps: int, title: str = "") -> Run:
    """Train a denoiser, from the same seed whatever the operator; `title` stands beside the progress bar.

    Returns
    -------
    Run
        The loss before each of `steps` updates, and the denoised face after the last.
    """
    device = scene.noisy.device
    noisy, clean = (as_clip(photo, size.frames, size.extent) for photo in scene)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Denoiser(operator, size.features).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    nn.functional.mse_loss(model(noisy), clean).backward()  # not timed: it compiles
    losses: list[Tensor] = []
    watch = Watch(device)
    watch.mark()
    for _ in rich.progress.track(range(steps), description=f"{title:10}"):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(noisy), clean)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())  # read at the end: no step waits for the GPU
        watch.mark()
    seconds, peak_memory = watch.read()
    with torch.no_grad():
        face = scene.noisy[FACE].permute(2, 0, 1)[None]
        denoised = model(face)[0].permute(1, 2, 0).clamp(0, 1).cpu()
    return Run(torch.stack(losses).tolist(), seconds, peak_memory, denoised)


class Watch:
    """A stopwatch for training steps that also reads the peak memory of a GPU.

    On a CPU memory is not measured: the peak of a process never falls, so that the second run could not be told from the first.
    """

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None
        self._marks: list[Any] = []
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self) -> None:
        """Mark the end of a step; no step waits for the GPU."""
        if self._device is None:
            self._marks.append(time.perf_counter())
        else:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record(torch.cuda.current_stream(self._device))

    def read(self) -> tuple[list[float], int | None]:
        """Return the seconds between marks, and the most bytes that PyTorch held on the GPU."""
        pairs = itertools.pairwise(self._marks)
        if self._device is None:
            return [end - start for start, end in pairs], None
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1000 for start, end in pairs], torch.cuda.max_memory_allocated(self._device)


def psnr(image: Tensor, clean: Tensor) -> float:
    """Return the peak signal-to-noise ratio in decibels of an image with intensities between 0 and 1."""
    return float(-10 * torch.log10(nn.functional.mse_loss(image.cpu(), clean.cpu())))


def run(steps: int, device_name: str, output: Path) -> int:
    """Train twice, print both losses, save the picture into the folder `output`, and return the exit code 0.

    Raises
    ------
    CudaError
        CUDA is asked for and no kernel runs here.
    OperandError
        `device_name` is none of "auto", "cpu", "cuda" and "cuda:1", or no GPU has that number.
    """
    console = rich.console.Console(highlight=False, markup=False)
    device, why = choose_device(device_name)
    console.print(why)
    scene, size = open_scene(device), SIZES[device.type]
    console.print(f"Training on {size.frames} overlapping views of a photograph, {size.extent} x {size.extent} pixels each.")
    with _repeatable():
        operators: dict[str, Operator] = {"composed": composed, "fused": fused_scale_bias_clamp}
        runs = {name: train(operator, scene, size, steps, name) for name, operator in operators.items()}
    console.print(_loss_table(runs), _cost_table(runs))
    difference = max(abs(a - b) for a, b in zip(runs["composed"].losses, runs["fused"].losses, strict=True))
    console.print(f"Largest difference of the losses: {difference:.2g}")
    output.mkdir(parents=True, exist_ok=True)
    save_picture(output / PICTURE, scene, runs, difference)
    console.print(f"Picture: {output / PICTURE}", soft_wrap=True)
    return 0


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """Make convolutions add in one order. One CPU thread is also the faster choice for them where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            yield
    finally:
        torch.set_num_threads(threads)


def choose_device(name: str) -> tuple[torch.device, str]:
    """Return the device that a name stands for, and a sentence that says what runs there and why."""
    routes = {route.arrays: route for route in _config.diagnose(_config.gather()).routes}
    on_cuda = routes[_config.TORCH_ON_CUDA]
    runs_kernels = on_cuda.path == _config.KERNEL
    if name == "cpu" or (name == "auto" and not runs_kernels):
        reason = "as asked" if name == "cpu" else f"no usable GPU: {on_cuda.reason}"
        same = "There the fused operator computes PyTorch's own expression, so expect equal losses and no gain"
        return torch.device("cpu"), f"Running on the CPU ({reason}). {same}."
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cuda") or (index and not index.isdecimal()):
        raise OperandError(message("demo", "--device", expected="auto, cpu, cuda or cuda:1", got=name, remedy="See --help."))
    if not runs_kernels:
        remedy = "`python -m cupyfused doctor` says what mends it; --device cpu needs no GPU."
        raise CudaError(message("demo", "--device", expected="a GPU that kernels run on", got=on_cuda.reason, remedy=remedy))
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        expected, remedy = f"one of {count} GPUs, numbered from 0", "Leave it out to take the first."
        raise OperandError(message("demo", "--device", expected=expected, got=name, remedy=remedy))
    device = torch.device("cuda", int(index or 0))
    return device, f"Running on {torch.cuda.get_device_name(device)} ({on_cuda.reason})."


def _loss_table(runs: dict[str, Run]) -> rich.table.Table:
    table = rich.table.Table("step", *runs, "difference", title="Loss (mean squared error)", title_justify="left")
    curves = [one.losses for one in runs.values()]
    last = len(curves[0]) - 1
    for step in sorted({round(last * row / (TABLE_ROWS - 1)) for row in range(TABLE_ROWS)}):
        losses = [curve[step] for curve in curves]
        table.add_row(str(step), *(f"{loss:.6f}" for loss in losses), f"{losses[1] - losses[0]:.2g}")
    return table


def _cost_table(runs: dict[str, Run]) -> rich.table.Table:
    table = rich.table.Table("run", "time", "median step", "peak memory", title="Cost", title_justify="left")
    for name, one in runs.items():
        memory = "n/a on a CPU" if one.peak_memory is None else f"{one.peak_memory / 2**20:.0f} MiB"
        table.add_row(name, f"{sum(one.seconds):.2f} s", f"{1000 * statistics.median(one.seconds):.1f} ms", memory)
    return table


def save_picture(path: Path, scene: Scene, runs: dict[str, Run], difference: float) -> None:
    """Draw the face before and after, and the loss curves of both runs."""
    clean = scene.clean[FACE].cpu()
    figure = Figure(figsize=(8.4, 6.6), layout="constrained")
    figure.suptitle("One denoiser, trained with composed PyTorch and with the fused operator")
    axes = figure.subplot_mosaic([["Before", "After", "Original"], ["losses"] * 3], height_ratios=[1.25, 1])
    images = {"Before": scene.noisy[FACE].cpu().clamp(0, 1), "After": runs["fused"].denoised, "Original": clean}
    for name, image in images.items():
        quality = "" if image is clean else f": {psnr(image, clean):.1f} dB"
        axes[name].imshow(image.numpy(), interpolation="nearest")
        axes[name].set_title(name + quality)
        axes[name].set_axis_off()
    losses = axes["losses"]
    composed_line, fused_line = "torch.clamp(x * scale + bias, -1, 1)", "fused_scale_bias_clamp(x, scale, bias, -1, 1)"
    losses.plot(runs["composed"].losses, color="#f0a030", linewidth=6, alpha=0.6, label=composed_line)
    losses.plot(runs["fused"].losses, color="#1f3b73", linewidth=1.5, label=fused_line)
    losses.set(xlabel="training step", ylabel="mean squared error", ylim=(0, None))
    losses.set_title(f"Loss; the two curves differ by {difference:.2g} at most")
    losses.grid(alpha=0.25)
    losses.legend()
    with io.BytesIO() as drawn:
        figure.savefig(drawn, format="png", dpi=100)
        Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)  # noise does not compress: fewer colours do
