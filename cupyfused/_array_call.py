"""A call with NumPy or CuPy arrays: no gradients, so straight from the door to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays, _kernel
from ._arrays import Kind, Operand
from ._dtypes import BY_NAME
from ._op import Call, choose_backend, decide, fitted, open_operands, run
from ._out import open_out

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["call_arrays"]

_COMPUTE = {"float16": "float32", "bfloat16": "float32"}


def call_arrays(op: Op, kind: Kind, values: Sequence[Any], out: Any, impl: str) -> Any:
    """Compute an op for arrays of one kind."""
    operands = open_operands(op, kind, values, BY_NAME["float32"])
    device = operands[0].device
    assert device is not None
    backend = choose_backend(op, impl, device)
    opened = None if out is None else open_out(op, kind, out)
    signature = tuple((type(one.value) if one.device is None else None, one.described, one.typed) for one in operands)
    key = None if opened else (kind.name, device, backend and backend.name, signature)
    call = op.calls.get(key) if key else None
    if call is None:
        call = decide(op, operands, opened, backend)
        if key:
            op.remember(key, call)
    result = out if out is not None else kind.empty(call.shape, call.strides, call.dtype, device)
    if backend is None:
        namespace = np if kind is _arrays.NUMPY else _kernel.import_cupy()
        result[...] = _reference(op, namespace, call, operands)
    elif call.launch is not None:
        slots = [one.address if one.described.array else one.value or 0 for one in operands]
        run(op, call, kind.stream(device), kind.address(result), slots)
    return result


def _reference(op: Op, namespace: Any, call: Call, operands: Sequence[Operand]) -> Any:
    """Compute the expression in the dtype of the arithmetic; overflow and NaN are values here, not warnings."""
    compute = np.dtype(_COMPUTE.get(call.dtype.name, call.dtype.name))
    numbers = fitted(op, call, [one.value for one in operands])
    values = [
        value if one.typed is None else _cast(namespace, value, compute) if one.described.array else compute.type(value)
        for one, value in zip(operands, numbers)
    ]
    with np.errstate(all="ignore"):
        return op.reference(namespace, *values)


def _cast(namespace: Any, array: Any, compute: Any) -> Any:
    """Return an array as a plain one of the dtype: a numpy.matrix would multiply as matrices do."""
    return namespace.asarray(array).astype(compute, copy=False)
