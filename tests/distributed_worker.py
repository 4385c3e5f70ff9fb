"""What runs in processes of their own: two ranks that train one network together, and a data set for loader workers."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import FUSED, ROUNDED_ONCE, Network, Operators, train
from targets import HOST, Target
from torch import Tensor, nn

from cupyfused import _op, fused_scale_bias, fused_scale_bias_clamp

__all__ = ["STEPS", "Frames", "run_ranks", "train_together"]

RANKS, STEPS, TIMEOUT = 2, 3, 120
Results = dict[str, Tensor]


def run_ranks(function: Callable[..., None], folder: Path, *arguments: Any) -> list[Any]:
    """Run `function(rank, folder, *arguments)` in two processes and return what each saved; the error of one rises here."""
    context = torch.multiprocessing.start_processes(function, (folder, *arguments), nprocs=RANKS, join=False, start_method="spawn")
    end = time.monotonic() + TIMEOUT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"the ranks have not ended after {TIMEOUT} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@contextlib.contextmanager
def joined(rank: int, folder: Path, device_type: str) -> Iterator[torch.device]:
    """Be one rank of the group, on a device of its own if that is a GPU."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=TIMEOUT / 2),
    )
    yield device
    torch.distributed.destroy_process_group()  # not after an error: the other rank would fail of that, and perhaps be heard first


def own_share(rank: int, folder: Path, device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the parameters to begin with, and this rank's part of the batch: images and what is right for them."""
    state, x, right = torch.load(folder / "task.pt", map_location=device)
    return state, x.chunk(RANKS)[rank], right.chunk(RANKS)[rank]


def network(operators: Operators, state: dict[str, Tensor], device: torch.device, dtype: torch.dtype = torch.float64) -> Network:
    """Return a network with these parameters."""
    made = Network(operators).to(device, dtype)
    made.load_state_dict(state)
    return made


# ---- training together ----------------------------------------------------------------------------------------------------


def train_together(rank: int, folder: Path, targets: Sequence[Target], sharding: bool) -> None:
    """Train in every way on each target, and save losses and parameters of each."""
    results = {}
    with joined(rank, folder, targets[0].device) as device:
        state, x, right = own_share(rank, folder, device)
        for target in targets:
            _op.cpu_impl = "host" if target == HOST else "reference"  # of calls without impl= in this process
            results[f"{target.impl} replicated"] = train_replicated(network(FUSED, state, device), x, right)
            if not sharding:
                continue
            results[f"{target.impl} sharded"] = train_sharded(network(FUSED, state, device), x, right)
            for name, operators in (("bfloat16", FUSED), ("bfloat16 composed", ROUNDED_ONCE)):
                model = network(operators, state, device, torch.float32)
                results[f"{target.impl} {name}"] = train_sharded(model, x.float(), right.float(), torch.bfloat16)
    torch.save(results, folder / f"{rank}.pt")


def train_replicated(model: Network, x: Tensor, right: Tensor) -> Results:
    """Train by DistributedDataParallel."""
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[x.device] if x.is_cuda else None)
    losses = train(parallel, x, right, STEPS)
    return {"losses": losses, **model.state_dict()}


def train_sharded(model: Network, x: Tensor, right: Tensor, gathered: torch.dtype | None = None) -> Results:
    """Train by `fully_shard`: each part that holds parameters of the operators is a group of its own, the rest is one.

    `gathered`: the dtype that parameters are gathered in, and so that of all that is computed.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=x.dtype)
    mesh = init_device_mesh(x.device.type, (RANKS,))
    seen: set[torch.dtype] = set()
    model.clamp.register_forward_hook(lambda module, inputs, y: seen.add(y.dtype))
    for part in (model.clamp, model.affine, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    losses = train(model, x, right, STEPS)
    assert seen == {gathered or x.dtype}
    return {"losses": losses, **{name: one.full_tensor().detach() for name, one in model.named_parameters()}}


# ---- loading data -----------------------------------------------------------------------------------------------------------


class Frames(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Images that a loader's worker normalises, as tensors and as NumPy arrays."""

    bias = np.array([-0.5, -1.25, -2.125], np.float32)

    def __init__(self, impl: str):
        self.impl = impl

    def __len__(self) -> int:
        return 6

    @staticmethod
    def frame(k: int) -> np.ndarray[Any, Any]:
        return (np.arange(5 * 7 * 3) * (k + 1) % 256).astype(np.uint8).reshape(5, 7, 3)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        tensor = fused_scale_bias(torch.from_numpy(self.frame(k)[..., 1:]), torch.from_numpy(self.bias[1:]), 0.5, impl=self.impl)
        array = fused_scale_bias_clamp(self.frame(k), np.float32(1 / 64), self.bias, -1.0, 1.0, impl=self.impl)
        return tensor, torch.from_numpy(array)
