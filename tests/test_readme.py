"""The README's example prints what it says, and its commands are those that CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupyfused

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_prints_its_result() -> None:
    pytest.importorskip("torch")
    code, printed = _blocks("python")[0], _blocks("text")[0]
    assert len([line for line in code.splitlines() if line]) <= 7
    assert subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout == printed


def test_ci_runs_the_test_command_as_it_stands() -> None:
    (command,) = (block.strip() for block in _blocks("sh") if "pytest" in block)
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_main_job_is_a_command_of_the_package() -> None:
    demo, tests = _blocks("sh")[:2]
    assert "python -m cupyfused demo" in demo
    assert "pytest" in tests
    done = subprocess.run([sys.executable, "-m", "cupyfused", "demo", "--help"], text=True, capture_output=True, check=False)
    assert done.returncode == 0


def test_every_public_operator_is_in_the_table() -> None:
    for name in cupyfused.__all__:
        if name.startswith("fused_"):
            assert f"`{name}(" in README


def test_environment_variables_are_those_of_the_code() -> None:
    named = set(re.findall(r"CUPYFUSED_\w+", README))
    texts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cupyfused").glob("*.py"))
    used = set(re.findall(r"CUPYFUSED_\w+", texts)) - {"CUPYFUSED_HOST_FLAGS"}  # for tests only
    assert named == used


def test_every_row_of_what_works_with_what_is_held_by_tests() -> None:
    """Each name in docs/pytorch.md is that of a test; a row without one says why not."""
    lines = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and line.count("|") == 4]  # the table of measurements has more columns
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    known = set(re.findall(r"def (test_\w+)", texts))
    named = [(row, re.findall(r"`(test_\w+)`", row.split("|")[-2])) for row in rows if not row.startswith("| with |")]
    assert len(named) > 30
    assert {name for _, names in named for name in names} <= known
    assert [row.split("|")[1].strip() for row, names in named if not names] == ["free-threaded Python"]
