"""What a run of the benchmark gave, with all that its numbers depend on, and its JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _config
from ..errors import OperandError, message

__all__ = ["FORWARD", "SCHEMA", "TRAINING", "Absent", "Results", "Timing", "load", "machine", "save", "versions"]

SCHEMA = 1  # of the JSON
FORWARD, TRAINING = "forward", "forward + backward"


@dataclass(frozen=True)
class Timing:
    """One measured time, or why there is none."""

    section: str
    case: str
    peer: str
    step: str
    seconds: float | None = None
    problem: str = ""  # why it was not timed
    dtype: str = "float32"
    elements: int = 0
    moved: int = 0  # bytes that must move
    floor: float | None = None  # seconds of a copy that moves as many bytes, in the same run

    @property
    def share(self) -> float | None:
        """The share of the copy's rate that was reached."""
        return None if self.floor is None or self.seconds is None else self.floor / self.seconds


@dataclass(frozen=True)
class Absent:
    """A part or a peer that could not take part, and why."""

    what: str
    why: str


@dataclass
class Results:
    """A whole run."""

    command: str
    date: str  # UTC
    machine: dict[str, str]
    versions: dict[str, str]
    timings: list[Timing]
    absent: list[Absent]

    @property
    def untimed(self) -> list[Timing]:
        """What was not timed, since its values are wrong or it failed."""
        return [one for one in self.timings if one.problem]

    def of(self, section: str) -> list[Timing]:
        """Return what a section measured."""
        return [one for one in self.timings if one.section == section and one.seconds is not None]


def machine() -> dict[str, str]:
    """Name the machine that the numbers are of."""
    processor = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    described = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor or "unknown",
        "cores": str(os.cpu_count()),
        "threads of PyTorch": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        described["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return described


def versions() -> dict[str, str]:
    """Name the versions that the numbers depend on."""
    facts = _config.gather()
    found = dict(facts.versions)
    found["Python"] = platform.python_version()
    for name, library in (("PyTorch", facts.torch), ("CuPy", facts.cupy), ("NVRTC", facts.nvrtc)):
        found[name] = library.version or library.problem
    found["CUDA of PyTorch"] = torch.version.cuda or "none"
    found["CUDA of the driver"] = ".".join(map(str, facts.driver.cuda)) if facts.driver.cuda else facts.driver.problem
    try:
        found["Triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found["Triton"] = "not installed"
    return found


def save(results: Results, path: Path) -> None:
    """Write JSON: the fields of `Results`, and `schema`, which changes when their meaning does."""
    path.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(results)}, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    """Read what `save` wrote.

    Raises
    ------
    OperandError
        The file is of another schema.
    """
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    schema = fields.pop("schema", None)
    if schema != SCHEMA:
        remedy = "Measure again, or read it with the release that wrote it."
        raise OperandError(message("bench", str(path), expected=f"schema {SCHEMA}", got=str(schema), remedy=remedy))
    timings = [Timing(**one) for one in fields.pop("timings")]
    return Results(timings=timings, absent=[Absent(**one) for one in fields.pop("absent")], **fields)
