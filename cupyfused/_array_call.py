"""A call with NumPy or CuPy arrays: no gradients, so straight from the door to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays, _kernel, _op
from ._arrays import ArrayKind
from ._dtypes import BY_NAME
from ._in_place import Composed
from ._op import Call, choose_backend, decide, fitted, open_operands, run
from ._out import open_out

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["call_arrays"]


class _Ready:
    """A call's signature, decided, with what allocates its result."""

    def __init__(self, op: Op, kind: ArrayKind, call: Call, is_plain: bool):
        self.call = call
        self.allocate = kind.allocator(call.shape, call.strides, call.dtype, call.device)
        self.namespace: Any = np if kind is _arrays.NUMPY else None if call.backend else _kernel.import_cupy()
        self.compute = np.dtype(_COMPUTE.get(call.dtype.name, call.dtype.name))
        self.dtype = _arrays.library_dtype(call.dtype.name)
        self.strides = tuple(stride * call.dtype.size for stride in call.strides)
        typed = [one.typed for one in call.operands if one.typed is not None]
        # Numbers of a floating call need no look, and arrays of its dtype no cast.
        alike = call.dtype.is_floating and all(one.dtype.name == self.compute.name for one in typed)
        self.is_uncast = is_plain and alike  # an array of another class may multiply as matrices do
        self.numbers = [k for k, one in enumerate(call.operands) if one.typed is not None and one.device is None]
        self.composed = Composed(op.reference, self.namespace)
        self.gives_the_result = False  # whether the expression is known to give a fresh array that lies as the result must


def call_arrays(op: Op, kind: ArrayKind, values: Sequence[Any], out: Any, impl: str) -> Any:
    """Compute an op for arrays of one kind."""
    prepared = None if out is not None else _prepare(kind, values, impl)
    if prepared is not None:
        key, slots, values = prepared
        ready = op.calls.get(key)
        if ready is not None:
            return _run(op, kind, ready, values, slots, None)
    operands = open_operands(op, kind, values, BY_NAME["float32"])
    device = operands[0].device
    assert device is not None
    opened = None if out is None else open_out(op, kind, out)
    call = decide(op, operands, opened, choose_backend(op, impl, device))
    ready = _Ready(op, kind, call, is_plain=prepared is not None)
    slots = [one.address if one.described.array else one.value or 0 for one in operands]
    result = _run(op, kind, ready, [one.value for one in operands], slots, out)
    if prepared is not None:
        op.remember(key, ready)
    return result


def _prepare(kind: ArrayKind, values: Sequence[Any], impl: str) -> tuple[tuple[Any, ...], list[Any], list[Any]] | None:
    """Return what tells one signature from another, an address or number for each argument, and the arguments.

    Values of NumPy without dims are numbers. None if an argument is anything but a number or an array of the library's own class:
    the door looks closer.
    """
    array, place, given = kind.array, (0, 0), list(values)
    slots: list[Any] = []
    reads_memory = kind is not _arrays.NUMPY or "host" in (impl, _op.cpu_impl)
    key: list[Any] = [kind.name, impl, _op.cpu_impl]
    for value in values:
        own = type(value)
        if own is array and (value.shape or not slots or kind is not _arrays.NUMPY):
            if reads_memory:
                place = kind.place(value)
            slots.append(place[0])
            key += (value.dtype, value.shape, value.strides, place[1], place[0] & 15)
        elif own is float or own is int or own is bool:
            slots.append(value)
            key.append(own)
        elif value is None:
            slots.append(0)
            key.append(None)
        else:
            number = _arrays.as_number(value) if slots else None
            if number is None:
                return None
            given[len(slots)] = number
            slots.append(number)
            key.append(type(number))
    return tuple(key), slots, given


def _run(op: Op, kind: ArrayKind, ready: _Ready, values: Sequence[Any], slots: Sequence[Any], out: Any) -> Any:
    call = ready.call
    if call.backend is None:
        return _reference(op, ready, values, out)
    result = ready.allocate() if out is None else out
    if call.launch is not None:
        run(op, call, kind.stream(call.device), kind.place(result)[0], slots)
    return result


# ---- the composed expression --------------------------------------------------------------------------------------------

_COMPUTE = {"float16": "float32", "bfloat16": "float32"}


def _reference(op: Op, ready: _Ready, values: Sequence[Any], out: Any) -> Any:
    """Compute the expression in the dtype of the arithmetic; overflow and NaN are values here, not warnings."""
    call, compute = ready.call, ready.compute
    with np.errstate(all="ignore"):
        if ready.is_uncast:
            cast = list(values)
            for k in ready.numbers:
                cast[k] = compute.type(cast[k])
        else:
            cast = [
                value
                if one.typed is None
                else _cast(ready.namespace, value, compute)
                if one.described.array
                else compute.type(value)
                for one, value in zip(call.operands, fitted(op, call, values))
            ]
        y = ready.composed.compute(*cast)
        if out is None and (ready.gives_the_result or _is_the_result(y, cast, ready)):
            ready.gives_the_result = ready.composed.is_program  # a look takes 1 us
            return y
        result = ready.allocate() if out is None else out
        result[...] = y
    return result


def _is_the_result(y: Any, cast: Sequence[Any], ready: _Ready) -> bool:
    """Whether what the expression gave is a fresh array that lies as the result must."""
    if type(y) is not np.ndarray or y.dtype != ready.dtype or y.strides != ready.strides or not y.flags.owndata:
        return False
    return not any(one is y for one in cast)


def _cast(namespace: Any, array: Any, compute: Any) -> Any:
    """Return an array as a plain one of the dtype: a numpy.matrix would multiply as matrices do."""
    return namespace.asarray(array).astype(compute, copy=False)


_op.call_arrays = call_arrays
