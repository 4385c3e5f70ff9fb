"""What the composed expression returns: its dtype and its strides, folded over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import _layout
from ._arrays import Operand
from ._dtypes import Dtype, Rank, fold_types, result_type
from ._layout import Ints, Strided
from .errors import DtypeError, message

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["result_dtype", "result_strides"]


def result_dtype(op: Op, operands: Sequence[Operand]) -> Dtype:
    """Return the dtype of a call's result."""
    inputs, options = operands[: len(op.inputs)], operands[len(op.inputs) :]
    dtype = fold_types([one.typed for one in inputs if one.typed], [one.typed for one in options if one.typed])
    if dtype.name == "bool" and not op.takes_bool:
        raise DtypeError(
            message(op.name, op.inputs[0], expected="a result that is not bool", got="bool", remedy="Convert x first.")
        )
    return dtype


def result_strides(shape: Ints, inputs: Sequence[Operand], options: Sequence[Operand], on_cpu: bool) -> Ints:
    """Fold the strides of the composed expression: each step's result is the next step's first operand.

    On the CPU a step casts operands of another dtype before it looks at their strides, and a cast makes them dense.
    """
    zero_dim = Strided((), ())
    own, typed = inputs[0].described.array, inputs[0].typed
    assert own is not None and typed is not None
    for one in inputs[1:]:
        assert one.typed is not None
        common = result_type(typed, one.typed)
        pair = [own, one.described.array or zero_dim]
        if on_cpu:
            dtypes = (typed.dtype, one.typed.dtype)
            pair = [
                array if dtype is common.dtype else Strided(array.shape, _layout.like_strides(array))
                for array, dtype in zip(pair, dtypes)
            ]
        step_shape = _layout.broadcast_shapes([array.shape for array in pair])
        assert step_shape is not None
        own, typed = Strided(step_shape, _layout.result_strides(step_shape, pair)), common
    given = [one for one in options if one.typed is not None]
    if given:  # a step of its own; bounds count as operands only where all of them are tensors
        bounds = [zero_dim] if all(one.typed is not None and one.typed.rank == Rank.ZERO_DIM for one in given) else []
        return _layout.result_strides(shape, [own, *bounds])
    return own.strides
