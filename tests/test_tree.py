"""The tree keeps its promises: a new op is three files and one line, files and functions stay short, texts stay plain."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import cupyfused

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, CUDA = ROOT / "cupyfused", ROOT / "cuda_src"

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 300, 40, 60
BUDGET = re.compile(r"^(#|//) Budget: \S", re.MULTILINE)  # a file may break its budget where it says why

# CUDA texts that belong to no op.
SHARED = {"common.cuh", "elementwise.cuh", "sum_partials.cuh"}

# Files that name an op although they are not its own, and why they may.
NAMED_BY = {
    ("cupyfused/__init__.py", "*"): "the line of each op, its names in __all__, and their types for type checkers",
    ("cupyfused/nn/__init__.py", "fused_scale_bias_clamp"): "the line of its module",
    ("cupyfused/errors.py", "fused_scale_bias"): "the doctest of an error's wording",
    ("cupyfused/_warmup.py", "fused_scale_bias"): "the doctest compiles one op",
    ("cupyfused/bench/peers.py", "fused_scale_bias_clamp"): "the benchmark times one op",
    ("cupyfused/_demo.py", "fused_scale_bias_clamp"): "the demo trains with one op",
    ("cupyfused/ops/fused_scale_bias_clamp.py", "fused_scale_bias"): "without bounds it is that op",
}


def public_ops() -> list[str]:
    functions = [name for name in cupyfused.__all__ if inspect.isfunction(vars(cupyfused).get(name))]
    return [name for name in functions if getattr(cupyfused, name).__module__.startswith("cupyfused.ops.")]


OPS = public_ops()


def class_name(op: str) -> str:
    return "".join(part.capitalize() for part in op.split("_"))


def tracked() -> list[Path]:
    """Return the files of the repository, or those of the folders where there is no git."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
    folders = (PACKAGE, CUDA, ROOT / "tests")
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]
CUDA_TEXTS = sorted(CUDA.glob("*.cuh"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- a new op is three files and one line -------------------------------------------------------------------------------


def test_there_are_ops() -> None:
    assert {"fused_scale_bias", "fused_scale_bias_clamp"} <= set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_its_three_files(op: str) -> None:
    for path in (CUDA / f"{op}.cuh", PACKAGE / "ops" / f"{op}.py", ROOT / "tests" / "ops" / f"test_{op}.py"):
        assert path.is_file(), relative(path)


def test_every_file_belongs_to_an_op() -> None:
    assert {path.stem for path in (PACKAGE / "ops").glob("*.py")} - {"__init__"} == set(OPS)
    assert {path.name for path in CUDA_TEXTS} - SHARED == {f"{op}.cuh" for op in OPS}
    assert {path.stem for path in (PACKAGE / "nn").glob("*.py")} - {"__init__"} <= set(OPS)
    assert {path.stem for path in (ROOT / "tests" / "ops").glob("test_*.py")} == {f"test_{op}" for op in OPS}


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_one_line_and_its_names_in_init(op: str) -> None:
    lines = (PACKAGE / "__init__.py").read_text(encoding="utf-8").splitlines()
    assert sum(re.search(rf"\b{op}\b", line) is not None and "import" in line for line in lines) == 1
    assert f"from .ops.{op} import {op}" in lines
    assert {op, class_name(op)} <= set(cupyfused.__all__)
    assert list(cupyfused.__all__) == sorted(cupyfused.__all__)


@pytest.mark.parametrize("op", OPS)
def test_nothing_else_knows_an_op(op: str) -> None:
    own = {f"cupyfused/ops/{op}.py", f"cupyfused/nn/{op}.py", f"cuda_src/{op}.cuh"}
    for path in [*PACKAGE.rglob("*.py"), *CUDA_TEXTS, CUDA / "host_shim.h"]:
        name = relative(path)
        known = re.search(rf"\b({op}|{class_name(op)})\b", path.read_text(encoding="utf-8"))
        allowed = name in own or (name, "*") in NAMED_BY or (name, op) in NAMED_BY
        assert allowed or not known, f"{name} names {op}: the core must not know an op"


def test_the_list_of_exceptions_holds_no_more_than_it_must() -> None:
    for name, op in NAMED_BY:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert all(re.search(rf"\b{one}\b", text) for one in (OPS if op == "*" else [op])), f"{name} no longer names {op}"


NEW, TEMPLATE = "fused_scale_less_bias", "fused_scale_bias"


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, f"{old!r} is no longer there to make a new op of"
        text = text.replace(old, new)
    return text


def add_op(root: Path) -> None:
    """Add y = x * scale - bias: two files (its tests, the third, are the program below) and a line."""
    names = (TEMPLATE, NEW)
    functor = (root / "cupyfused" / "cuda_src" / f"{TEMPLATE}.cuh").read_text(encoding="ascii")
    signs = (
        ("multiply_add(x, scale, bias)", "multiply_add(x, scale, (T)(0 - bias))"),
        ("grad_bias = grad_out;", "grad_bias = -grad_out;"),
    )
    (root / "cupyfused" / "cuda_src" / f"{NEW}.cuh").write_text(replaced(functor, names, *signs), encoding="ascii")
    op = (root / "cupyfused" / "ops" / f"{TEMPLATE}.py").read_text(encoding="utf-8")
    text = replaced(op, names, ("return x * scale + bias\n", "return x * scale - bias\n"))
    (root / "cupyfused" / "ops" / f"{NEW}.py").write_text(text, encoding="utf-8")
    init = root / "cupyfused" / "__init__.py"
    line = f"from .ops.{TEMPLATE} import {TEMPLATE}\n"
    named = (f'    "{TEMPLATE}",\n', f'    "{class_name(NEW)}",\n    "{NEW}",\n    "{TEMPLATE}",\n')
    init.write_text(replaced(init.read_text(encoding="utf-8"), (line, line + line.replace(*names)), named), encoding="utf-8")


def test_an_op_added_that_way_works_everywhere(tmp_path: Path) -> None:
    """With NumPy and PyTorch, through the reference, the registered operator and, where there is g++, its own kernels."""
    pytest.importorskip("torch")
    shutil.copytree(PACKAGE, tmp_path / "cupyfused", ignore=shutil.ignore_patterns("__pycache__", "cuda_src"))
    shutil.copytree(CUDA, tmp_path / "cupyfused" / "cuda_src", ignore=shutil.ignore_patterns("__pycache__"))
    add_op(tmp_path)
    program = f"""
        import functools
        import shutil
        import numpy as np
        import torch
        import cupyfused
        from cupyfused import {NEW} as op

        assert cupyfused.__file__.startswith({str(tmp_path)!r})
        x, scale, bias = (np.random.default_rng().uniform(1, 2, shape) for shape in ((3, 4), (4,), (3, 1)))
        np.testing.assert_allclose(op(x, scale, bias), x * scale - bias, rtol=1e-14)
        leaves = [torch.tensor(one, requires_grad=True) for one in (x, scale, bias)]
        composed = leaves[0] * leaves[1] - leaves[2]
        grad_out = torch.rand_like(composed) + 1
        expected = torch.autograd.grad(composed, leaves, grad_out)
        calls = [op, cupyfused.{class_name(NEW)}.apply, torch.ops.cupyfused.{NEW}]
        if shutil.which("g++"):
            calls.append(functools.partial(op, impl="host"))
        for call in calls:
            y = call(*leaves)
            assert torch.allclose(y, composed, rtol=1e-12)
            for own, right in zip(torch.autograd.grad(y, leaves, grad_out), expected):
                assert own.shape == right.shape and torch.allclose(own, right, rtol=1e-12)
    """
    settings = os.environ | {"PYTHONPATH": str(tmp_path), "CUPYFUSED_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ---- budgets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_a_python_file_and_its_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if BUDGET.search(text):
        return
    assert len(text.splitlines()) <= FILE_LINES
    long = {name: lines for name, lines in function_lengths(text) if lines > FUNCTION_LINES}
    assert not long, f"functions over {FUNCTION_LINES} lines: {long}"


def function_lengths(text: str) -> Iterator[tuple[str, int]]:
    """Yield each function's name and the lines of its body, the docstring left out."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", CUDA_TEXTS, ids=relative)
def test_a_kernel_is_short(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    if BUDGET.search(text):
        return
    long = {name: lines for name, lines in kernel_lengths(text) if lines > KERNEL_LINES}
    assert not long, f"kernels over {KERNEL_LINES} lines: {long}"


def kernel_lengths(text: str) -> Iterator[tuple[str, int]]:
    """Yield each kernel's signature and the lines from its opening brace to its closing one, which stand in the first column."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if re.search(r"\b__global__\b", line) and not line.startswith(("#", "//")):
            first = next(place for place in range(number, len(lines)) if lines[place].rstrip().endswith("{"))
            last = next(place for place in range(first, len(lines)) if lines[place].startswith("}"))
            yield line, last - first + 1


def test_lengths_are_counted_right() -> None:
    """Else no budget would ever be broken."""
    text = 'def long():\n    """Two\n    lines."""\n' + "    pass\n" * 41 + "def short():\n    return 1\n"
    assert dict(function_lengths(text)) == {"long": 41, "short": 1}
    assert [lines for _, lines in kernel_lengths('extern "C" __global__ void K(int n)\n{\n' + "    f();\n" * 59 + "}\n")] == [61]


# ---- texts --------------------------------------------------------------------------------------------------------------


def test_cuda_texts_are_ascii_and_include_nothing() -> None:
    """They are joined into one source for a compiler that has no folders to look in."""
    for path in [*CUDA_TEXTS, CUDA / "host_shim.h"]:
        assert path.read_bytes().isascii(), relative(path)
    for path in CUDA_TEXTS:
        assert not re.search(r"^\s*#\s*include", path.read_text(encoding="ascii"), re.MULTILINE), relative(path)


# Spelled in parts, so that this file does not hold them.
LEFT_OVER = re.compile("|".join([r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b"]))
OF_ONE_MACHINE = re.compile(r"(?<![\w.])/(" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me"]) + r")/")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_file_holds_notes_to_oneself_or_paths_of_one_machine(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # a picture
    for pattern in (LEFT_OVER, OF_ONE_MACHINE):
        found = pattern.search(text)
        assert found is None, f"{relative(path)}, line {text[: found.start()].count(chr(10)) + 1}: {found[0]}"
