"""What a peer takes from a fresh process to its first result; run as `python -m cupyfused.bench.first_result PEER FOLDER`.

PyTorch is imported and CUDA is initialised before the clock starts, since all that is compared needs them. What a peer imports
beyond PyTorch counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from ..errors import CupyfusedError
from .cases import FLAT, operands
from .peers import ON_GPU, by_name, converted
from .timing import waiter

__all__ = ["ELEMENTS", "measure"]

ELEMENTS = 2**20

# Where each compiler that takes part keeps what it has compiled.
_CACHES = (
    "CUDA_CACHE_PATH",
    "CUPYFUSED_CACHE_DIR",
    "CUPY_CACHE_DIR",
    "PYTORCH_KERNEL_CACHE_PATH",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)


def measure(name: str, scratch: Path, caches: Path) -> dict[str, float]:
    """Run a peer in a fresh process.

    Parameters
    ----------
    name
        Of the peer.
    scratch
        Where it builds.
    caches
        A folder that holds all caches; what is not in it is compiled.

    Returns
    -------
    dict
        Seconds until it was built, until its first result, and, if it has gradients, until its first gradients.

    Raises
    ------
    CupyfusedError
        The process failed; the message ends with the last line that it wrote.
    """
    folders = {variable: str(caches / variable.lower()) for variable in _CACHES}
    for folder in folders.values():
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", __name__, name, str(scratch)]
    done = subprocess.run(command, env=os.environ | folders, text=True, capture_output=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise CupyfusedError(f"a fresh process ended with exit status {done.returncode}: {last}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _main(name: str, scratch: Path) -> None:
    peer = by_name()[name]
    device = "cuda" if peer in ON_GPU else "cpu"
    tensors = operands(FLAT, ELEMENTS, torch.float32, device)
    synchronise = waiter(device)
    synchronise()
    begin = time.perf_counter()
    call = peer.build(scratch)
    seconds = {"build": time.perf_counter() - begin}
    arrays = [converted(one, peer.arrays) for one in tensors]
    call(*arrays)
    synchronise()
    seconds["first result"] = time.perf_counter() - begin
    if peer.has_gradients:
        leaves = [one.detach().requires_grad_() for one in tensors]
        torch.autograd.grad(call(*leaves), leaves, torch.ones_like(leaves[0]))
        synchronise()
        seconds["first gradients"] = time.perf_counter() - begin
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
    # Past the interpreter's end, which can overtake PyTorch's backward threads: of 91 scripts of PyTorch 2.11 alone, 20 at a time,
    # that ended after the backward of an autograd.Function, 4 aborted.
    os._exit(0)
