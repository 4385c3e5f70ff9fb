"""What may be written to: the checks of `out=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _layout
from ._arrays import Device, Kind, Operand, device_name, kind_of, open_door
from ._dtypes import BY_NAME, Dtype
from ._layout import Ints
from .errors import DtypeError, OperandError, message

if TYPE_CHECKING:
    from ._op import Op

__all__ = ["check_out", "open_out"]


def open_out(op: Op, kind: Kind, out: Any) -> Operand:
    """Take an `out` through the door."""
    own = kind_of(out)
    if own is None or own.name != kind.name:
        got = own.name if own is not None else type(out).__name__
        raise DtypeError(message(op.name, "out", expected=f"a {kind.name}", got=got, remedy="Pass an array of the kind of x."))
    if not getattr(getattr(out, "flags", None), "writeable", True):
        remedy = "Pass a copy."
        raise OperandError(
            message(op.name, "out", expected="an array that can be written to", got="a read-only one", remedy=remedy)
        )
    return open_door(op, kind, "out", out, BY_NAME["float32"], optional=False)


def check_out(op: Op, out: Operand, operands: Sequence[Operand], shape: Ints, dtype: Dtype, device: Device) -> None:
    """Refuse an `out` of another shape, dtype or device, or one whose memory is also an input's in part."""
    told, geometry = out.described, out.described.array
    assert geometry is not None and told.dtype is not None
    if geometry.shape != shape:
        raise OperandError(
            message(op.name, "out", expected=f"shape {shape}", got=f"{geometry.shape}", remedy="Pass one of the broadcast shape.")
        )
    if told.dtype is not dtype:
        raise DtypeError(
            message(op.name, "out", expected=f"dtype {dtype.name}", got=told.dtype.name, remedy="Pass one of the promoted dtype.")
        )
    if out.device != device:
        raise OperandError(
            message(
                op.name, "out", expected=f"device {device_name(device)}", got=device_name(out.device), remedy="Allocate it there."
            )
        )
    if _layout.overlaps_itself(geometry):
        raise OperandError(
            message(
                op.name,
                "out",
                expected="elements that each have a place of their own",
                got=f"strides {geometry.strides}",
                remedy="Pass one that is not expanded.",
            )
        )
    for name, one in zip((*op.inputs, *op.options), operands):
        own = one.described.array
        same = own is not None and one.address == out.address and own == geometry and one.described.dtype is told.dtype
        if own is not None and not same and _share_memory(one, out):
            remedy = "Pass x itself or an array of its own."
            raise OperandError(
                message(
                    op.name, "out", expected=f"memory apart from {name}, or {name} itself", got="a partial overlap", remedy=remedy
                )
            )


class _Extent:
    """Lets NumPy reason about memory that it must not read."""

    def __init__(self, one: Operand):
        array, dtype = one.described.array, one.described.dtype
        assert array is not None and dtype is not None
        self.__array_interface__ = {
            "version": 3,
            "data": (one.address, False),
            "shape": array.shape,
            "strides": tuple(stride * dtype.size for stride in array.strides),
            "typestr": f"|V{dtype.size}",
        }


def _share_memory(a: Operand, b: Operand) -> bool:
    first, second = np.asarray(_Extent(a)), np.asarray(_Extent(b))
    try:
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]  # NumPy's stub knows 0 and -1 only
    except np.exceptions.TooHardError:
        return True
