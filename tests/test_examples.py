"""Each example runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "told"), [("drop_in.py", "the same on"), ("arrays.py", "NumPy: ndarray float32 (8, 270, 480, 3)")]
)
def test_example(name: str, told: str) -> None:
    if name == "drop_in.py":
        pytest.importorskip("torch")
    assert f"python examples/{name}" in (FOLDER / name).read_text(encoding="utf-8")
    done = subprocess.run([sys.executable, FOLDER / name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {"drop_in.py", "arrays.py"}
