"""fused_scale_bias: the contract."""

from __future__ import annotations

from typing import Any

from contract import Contract, OpUnderTest
from torch import Tensor

from cupyfused import fused_scale_bias


def composed(x: Any, scale: Any, bias: Any) -> Tensor:
    return x * scale + bias  # type: ignore[no-any-return]


class TestContract(Contract):
    op = OpUnderTest(
        call=fused_scale_bias,
        function="FusedScaleBias",
        composed=composed,
        inputs=("x", "scale", "bias"),
        reads={"x": frozenset({"scale"}), "scale": frozenset({"x"}), "bias": frozenset()},
    )
