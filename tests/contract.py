"""What every op must pass. A test file of an op derives from `Contract`, says in `op` what the op is, and adds what is its own.

The pieces: `checks` (the op as the contract sees it, tolerances, comparisons), `layouts` (shapes and layouts), and the checks in
`contract_values`, `contract_gradients`, `contract_calls`, `contract_transforms`, `contract_compiled` and `contract_arrays`.
"""

from __future__ import annotations

from checks import TOLERANCE, OpUnderTest, assert_agree, assert_close, assert_same, check_forward, check_gradients, draw_arguments
from contract_arrays import Arrays
from contract_calls import Calls
from contract_compiled import Compiled
from contract_gradients import Gradients
from contract_transforms import Transforms
from contract_values import Values

__all__ = [
    "TOLERANCE",
    "Contract",
    "OpUnderTest",
    "assert_agree",
    "assert_close",
    "assert_same",
    "check_forward",
    "check_gradients",
    "draw_arguments",
]


class Contract(Values, Gradients, Calls, Transforms, Compiled, Arrays):
    """All checks."""
