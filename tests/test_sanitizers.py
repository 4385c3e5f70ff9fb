"""The kernels' own text under AddressSanitizer and UBSan, in every layout class and dtype; and that these would see a fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are built for the CPU by g++")

CALLS = Path(__file__).with_name("sanitized_calls.py")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -O0"


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    libraries = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "CUPYFUSED_HOST_FLAGS": FLAGS,
        # The interpreter itself frees little at exit; fibers move between stacks, which the second option cannot follow.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:alloc_dealloc_mismatch=0",
    }
    return subprocess.run([sys.executable, *arguments], env=environment, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("part", ["floats", "integers", "mixed"])
def test_no_kernel_touches_what_is_not_its_own(part: str) -> None:
    done = _run([str(CALLS), part])
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 50


def test_a_kernel_that_reads_one_element_too_far_is_caught() -> None:
    """The guard zones are there: the same call with a functor that reads beyond its operand dies."""
    script = """
import dataclasses, torch
from cupyfused import _source
from cupyfused.ops.fused_scale_bias import OP
real = _source.cuda_text("elementwise.cuh")
place = "name[i].load(p.address[k], offset[k] + i"
texts = {"elementwise.cuh": real.replace(place, place.replace("offset[k]", "offset[k] + 4 * (k == 1)"))}
assert texts["elementwise.cuh"] != real
text_of = _source.cuda_text
_source.cuda_text = lambda name: texts.get(name) or text_of(name)
OP(torch.randn(33, 7), 2.0, 1.0, impl="host")
print("not caught")
"""
    done = _run(["-c", script])
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
