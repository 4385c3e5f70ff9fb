"""The command: run the sections, show progress, and save tables, JSON and pictures."""

from __future__ import annotations

import contextlib
import datetime
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import rich.console
import rich.markup
import rich.progress
import torch

from .. import _config
from ..errors import OperandError, message
from .pictures import draw
from .ready import failure
from .report import print_results
from .results import Absent, Results, Timing, machine, save, versions
from .sections import SECTIONS, Plan

__all__ = ["NEED_GPU", "run"]

NEED_GPU = ("layouts", "latency", "host")
_MOST, _LEAST = 2**27, 2**20  # elements of x
_QUICK = 2**25
_BYTES_OF_AN_ELEMENT = 128  # 32 float32 arrays as large as x: float64 values beside composed gradients and the two of a copy


def run(quick: bool, output: Path, only: Sequence[str], elements: int | None) -> int:
    """Measure, print, and save `bench.json` and the pictures into the folder `output`.

    Returns
    -------
    int
        The exit code: 1 if something gave wrong values or failed, else 0.

    Raises
    ------
    OperandError
        `only` names a section that there is not.
    """
    unknown = [name for name in only if name not in SECTIONS]
    if unknown:
        remedy = "Separate sections by commas."
        raise OperandError(message("bench", "--only", expected=f"some of {','.join(SECTIONS)}", got=unknown[0], remedy=remedy))
    output.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
    console = rich.console.Console(highlight=False, markup=False)
    no_gpu = _no_gpu()
    console.print("Measuring on " + (f"the CPU alone: {no_gpu}." if no_gpu else f"{torch.cuda.get_device_name()}."), soft_wrap=True)
    command = ["python", "-m", "cupyfused", "bench", *(["--quick"] if quick else [])]
    command += [*(["--only", ",".join(only)] if only else []), *(["--elements", str(elements)] if elements else [])]
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    results = Results(shlex.join(command), date, machine(), versions(), [], [])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, _progress(console) as say:
        plan = Plan(no_gpu, quick, elements or _elements(no_gpu, quick), Path(scratch), say)
        for name in only or SECTIONS:
            _measure(name, plan, results)
    save(results, output / "bench.json")
    print_results(results, console)
    for path in (output / "bench.json", *draw(results, output)):
        console.print(f"Saved: {path}", soft_wrap=True)
    return 1 if results.untimed else 0


def _measure(name: str, plan: Plan, results: Results) -> None:
    if plan.no_gpu and name in NEED_GPU:
        results.absent.append(Absent(name, plan.no_gpu))
        return
    try:
        for one in SECTIONS[name](plan._replace(say=lambda text: plan.say(f"{name}: {text}"))):
            if isinstance(one, Timing):
                results.timings.append(one)
            elif one not in results.absent:
                results.absent.append(one)
    except Exception as error:  # what was measured so far is worth keeping
        results.timings.append(Timing(name, "", "all that was to come", "", problem=failure(error)))


@contextlib.contextmanager
def _progress(console: rich.console.Console) -> Iterator[Callable[[str], None]]:
    columns = (rich.progress.SpinnerColumn(), rich.progress.TimeElapsedColumn(), rich.progress.TextColumn("{task.description}"))
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=rich.markup.escape(text))


def _no_gpu() -> str:
    """Say why kernels cannot run on a PyTorch tensor here, "" where they can."""
    routes = {route.arrays: route for route in _config.diagnose(_config.gather()).routes}
    route = routes[_config.TORCH_ON_CUDA]
    return "" if route.path == _config.KERNEL else route.reason


def _elements(no_gpu: str, quick: bool) -> int:
    """Return how many elements the largest arrays have: as many as fit, up to where more would change no rate."""
    if no_gpu:
        return _LEAST
    free, _ = torch.cuda.mem_get_info()
    elements = _QUICK if quick else _MOST
    while elements > _LEAST and elements * _BYTES_OF_AN_ELEMENT > free:
        elements //= 2
    return elements
