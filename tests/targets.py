"""Where a test body runs: one device and one way of computing there."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["CUDA", "HOST", "REFERENCE", "Target"]


class Target(NamedTuple):
    """A device and the `impl` that is asked for on it."""

    device: str
    impl: str

    @property
    def runs_kernels(self) -> bool:
        """Whether the text of the kernels computes, on a GPU or built for the CPU."""
        return self.impl != "reference"

    def run(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a public function here."""
        return function(*arguments, impl=self.impl, **keywords)


REFERENCE, HOST, CUDA = Target("cpu", "reference"), Target("cpu", "host"), Target("cuda", "cuda")
