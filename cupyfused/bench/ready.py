"""From peers to calls that may be timed: built, their operands bound, their values right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .peers import Peer, converted, to_tensor
from .results import FORWARD, TRAINING, Timing
from .values import difference

__all__ = ["Describe", "Ready", "bind", "by_step", "failure", "make_ready"]

Describe = Callable[..., Timing]  # takes peer and step, and what was measured
Call = Callable[[], object]


class Ready(NamedTuple):
    """A peer with its operands bound."""

    name: str
    forward: Call
    recorded: Call | None = None  # forward, of operands that ask for gradients
    training: Call | None = None  # forward and all gradients


def make_ready(
    peers: Iterable[Peer], tensors: Sequence[Tensor], scratch: Path, describe: Describe
) -> tuple[list[Ready], list[Timing]]:
    """Build and check peers: return those whose values are right, and what is to be said of the others."""
    right, problems = [], []
    for peer in peers:
        if tensors[0].is_cuda:
            torch.cuda.empty_cache()  # CuPy's memory comes from beside PyTorch's
        try:
            call = peer.build(scratch)
            ready = bind(peer, call, tensors)
            problem = difference(_on_tensors(peer, call), tensors, peer.has_gradients)
        except Exception as error:  # other people's software: what fails is named, and the others are measured
            problem = failure(error)
        if problem:
            problems.append(describe(peer=peer.name, step=FORWARD, problem=problem))
        else:
            right.append(ready)
    return right, problems


def failure(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _on_tensors(peer: Peer, call: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *tensors: to_tensor(call(*(converted(one, peer.arrays) for one in tensors)))


def bind(peer: Peer, call: Callable[..., Any], tensors: Sequence[Tensor]) -> Ready:
    """Bind a peer's call to its operands."""
    arrays = [converted(one, peer.arrays) for one in tensors]
    if not peer.has_gradients:
        return Ready(peer.name, lambda: call(*arrays))
    leaves = [one.detach().requires_grad_() for one in tensors]
    grad_out = torch.randn_like(call(*arrays))
    return Ready(
        peer.name,
        lambda: call(*arrays),
        lambda: call(*leaves),
        lambda: torch.autograd.grad(call(*leaves), leaves, grad_out),
    )


def by_step(ready: Sequence[Ready]) -> Iterator[tuple[str, dict[str, Call]]]:
    """Yield each step with the calls of the peers that have it."""
    steps = {
        FORWARD: {one.name: one.forward for one in ready},
        TRAINING: {one.name: one.training for one in ready if one.training is not None},
    }
    yield from ((step, calls) for step, calls in steps.items() if calls)
