"""fused_scale_bias_clamp: the contract, and what its bounds add."""

from __future__ import annotations

from typing import Any

import torch
from contract import Contract, OpUnderTest
from torch import Tensor

from cupyfused import fused_scale_bias_clamp


def composed(x: Any, scale: Any, bias: Any, min_val: Any = None, max_val: Any = None) -> Tensor:
    v = x * scale + bias
    return v if min_val is None and max_val is None else torch.clamp(v, min_val, max_val)


def distance_to_bound(x: Any, scale: Any, bias: Any, min_val: Any, max_val: Any) -> Tensor:
    v = x * scale + bias
    distances = [(v - bound).abs() for bound in (min_val, max_val) if bound is not None]
    return torch.stack(distances).amin(0)


class TestContract(Contract):
    op = OpUnderTest(
        call=fused_scale_bias_clamp,
        function="FusedScaleBiasClamp",
        composed=composed,
        inputs=("x", "scale", "bias"),
        reads={"x": frozenset({"scale"}), "scale": frozenset({"x"}), "bias": frozenset()},
        reads_with_options=frozenset({"x", "scale", "bias"}),
        options=((-0.75, 0.875), (None, 0.375), (-0.25, None)),
        integer_options=((20, 90), (None, 50), (30, None)),
        distance_to_kink=distance_to_bound,
        takes_bool=False,
    )
