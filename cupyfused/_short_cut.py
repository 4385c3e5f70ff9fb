"""The short cut: from a plain call's signature to its launch.

On an H200's host a kernel launch costs 3 us and a torch.add 7, so every attribute that is read here counts. A call that is just
like one of the last few is told by one look, see `look_alike`; else one pass over the arguments reads what tells one plan from
another, and what was decided for that signature is kept ready.
"""

from __future__ import annotations

import functools
import importlib
import operator
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _dlpack, _op
from ._dtypes import BY_NAME, Dtype
from ._in_place import Composed
from ._op import Call
from ._promotion import DTYPES, TORCH_DTYPES
from ._torch_kind import TORCH, TORCH_UNREAD, TorchKind, raw_stream

if TYPE_CHECKING:
    from . import _arrays
    from ._layout import Ints
    from ._op import Op

__all__ = ["Prepared", "Ready", "look_alike", "open_values", "prepare", "prepare_again", "remember_seen", "without_class"]


class Ready:
    """A call's signature, decided, with everything about PyTorch that a call of it needs."""

    def __init__(self, op: Op, call: Call, values: Sequence[Any]):
        x = values[0]
        self.op, self.call = op, call
        self.shape, self.strides, self.launch = call.shape, call.strides, call.launch
        self.dtype = TORCH_DTYPES[call.dtype.name]
        self.like_x = self.dtype is x.dtype
        self.stream: Callable[[], int] = raw_stream(call.device[1]) if call.device[0] == _dlpack.CUDA else int
        # The composed expression, where nothing is cast to compute it.
        dtypes = [value.dtype for value in values if isinstance(value, Tensor)]
        is_uncast = call.backend is None and self.dtype in _UNCAST and all(one is self.dtype for one in dtypes)
        self.composed = Composed(op.reference, torch) if is_uncast else None
        # A number that is a float counts as the default dtype beside integers.
        depends = not x.dtype.is_floating_point and any(isinstance(value, float) for value in values)
        self.default_dtype = torch.get_default_dtype() if depends else None
        self.saving: dict[Any, Ints] = {}  # which arguments backward needs, by the gradients asked for
        # Arguments that are no numbers: what stands for them until they are asked for again is None.
        self.blank = [k for k, value in enumerate(values) if value is None or isinstance(value, Tensor)]
        # What a saved tensor must still be for a kernel to read it.
        self.told = [(one.dtype, one.shape, one.device) if isinstance(one, Tensor) else None for one in values]
        self.as_tensors = _op.are_tensors(values[len(op.inputs) :])
        self.seen: list[_Seen] = []  # what tells calls of this signature; making one takes as long as a call
        self.is_told = self.default_dtype is None
        self.seen_backward: list[Any] = []  # the last few backward calls, see `_autograd`

    @functools.cached_property
    def apply(self) -> Any:
        """The op's `autograd.Function`, recording."""
        return importlib.import_module("cupyfused._autograd").plain_apply(self.op)

    def launched(self, values: Sequence[Any], slots: list[Any]) -> Tensor:
        """Allocate the result and launch the forward kernel."""
        # The quickest of all allocations: 1.3 us where empty_like takes 1.9 and empty_strided 2.2.
        allocate = values[0].new_empty_strided
        result: Tensor = allocate(self.shape, self.strides) if self.like_x else allocate(self.shape, self.strides, dtype=self.dtype)
        launch = self.launch
        if launch is not None:
            if self.call.items:
                for k in self.call.items:
                    slots[k] = values[k].item()
            try:
                launch(self.stream(), result.data_ptr(), *slots)
            except (struct.error, OverflowError):
                launch(self.stream(), result.data_ptr(), *_op.fitted(self.op, self.call, slots))
        return result


_UNCAST = (torch.float32, torch.float64)


Prepared = tuple[Ready, list[Any], bool]


def prepare(op: Op, values: Sequence[Any], impl: str, dtype: Dtype | None = None) -> Prepared | None:
    """Return what is decided for a call, an address or number for each argument, and whether a tensor requires a gradient.

    None if an argument is anything but a number or a plain tensor with memory of its own: no subclass, no lazy sign. `dtype`
    overrides the promoted one.
    """
    key: list[Any] = [impl, _op.cpu_impl, dtype]
    slots: list[Any] = []
    requires_grad = False
    try:
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                if value.is_neg():
                    return None
                address = value.data_ptr()
                # A tensor of zeros that PyTorch keeps no memory for, or meta, or one whose storage was freed; of a view further
                # into a freed one the address tells nothing, and PyTorch's own operations read there too.
                if not address and value.numel():
                    return None
                slots.append(address)
                key += (value.dtype, value.shape, value.stride(), value.device, address & 15)
                if value.requires_grad:
                    requires_grad = True
            elif kind is float or kind is int or kind is bool:
                slots.append(value)
                key.append(kind)
            elif value is None:
                slots.append(0)
                key.append(None)
            else:
                return None
    except RuntimeError:  # no address: a wrapper of functorch, a sparse tensor
        return None
    signature = tuple(key)
    ready = op.calls.get(signature)
    if ready is None or (ready.default_dtype is not None and ready.default_dtype is not torch.get_default_dtype()):
        if values[0].device.type not in ("cpu", "cuda"):
            return None
        ready = _decide(op, values, impl, dtype)
        op.remember(signature, ready)
    return ready, slots, requires_grad


# ---- a call just like one before ----------------------------------------------------------------------------------------

_KEPT = 4  # signatures for each combination of types; a look at one that is not the call's takes 0.3 us
_guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def look_alike(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return what tells by one look whether tensors are just like these ones.

    That is their class, dtype, shape, strides, device and sign, whether they require a gradient, and whether autocast is on; not
    all of what watches calls, so `is_watched` is asked besides. It is what code compiled by Dynamo begins with: a private name,
    so None where it is missing, or where it would not know these ones again, as if one comes twice; then each call is prepared.
    """
    if _guards is None:
        return None
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    check: Callable[..., bool] = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check if check(*tensors) else None


class _Seen:
    """A call that was prepared."""

    def __init__(self, ready: Ready, check: Callable[..., bool], values: Sequence[Any], requires_grad: bool):
        self.ready, self.check, self.requires_grad = ready, check, requires_grad
        self.tensors = [k for k, value in enumerate(values) if isinstance(value, Tensor)]
        pick = operator.itemgetter(*self.tensors)  # 0.4 us less than a list of three
        self.pick = pick if len(self.tensors) > 1 else lambda values: (pick(values),)
        self.absent = [k for k, value in enumerate(values) if value is None]


def prepare_again(op: Op, values: Sequence[Any]) -> Prepared | None:
    """Return what `prepare` would, for a call just like one of the last few; None if it is another."""
    for seen in op.seen.get((_op.cpu_impl, *map(type, values)), ()):
        tensors = seen.tensors
        if seen.check(*seen.pick(values)):
            slots, bits = list(values), 0
            for k in tensors:
                slots[k] = address = values[k].data_ptr()
                bits |= address or 1  # no address: its storage was freed, or it has no elements
            if bits & 15 == 0:
                for k in seen.absent:
                    slots[k] = 0
                return seen.ready, slots, seen.requires_grad
    return None


def remember_seen(op: Op, values: Sequence[Any], prepared: Prepared) -> None:
    """Keep a call that `prepare` knew, unless more than a look at its tensors decides about it."""
    ready, slots, requires_grad = prepared
    is_aligned = not any(slot & 15 for value, slot in zip(values, slots) if isinstance(value, Tensor))
    if not ready.is_told or not is_aligned:
        return
    tensors = [value for value in values if isinstance(value, Tensor)]
    known = next((one for one in ready.seen if one.check(*tensors)), None)
    if known is None:
        check = look_alike(tensors)
        if check is None or len(ready.seen) == _KEPT:
            ready.is_told = False
            return
        known = _Seen(ready, check, values, requires_grad)
        ready.seen.append(known)
    seen = op.seen.setdefault((_op.cpu_impl, *map(type, values)), [])
    seen.insert(0, known)
    del seen[_KEPT:]


def _decide(op: Op, values: Sequence[Any], impl: str, dtype: Dtype | None) -> Ready:
    """Take a call of a new signature through the door, which checks everything."""
    reads_memory = values[0].is_cuda or impl == "host" or _op.cpu_impl == "host"
    operands = open_values(op, values, TORCH if reads_memory else TORCH_UNREAD)
    device = operands[0].device
    assert device is not None
    return Ready(op, _op.decide(op, operands, None, _op.choose_backend(op, impl, device), dtype), values)


def without_class(value: Any) -> Any:
    """Return a tensor of a subclass as the plain one that it is below the dispatcher."""
    return value if type(value) is Tensor or not isinstance(value, Tensor) else value.as_subclass(Tensor)


def open_values(op: Op, values: Sequence[Any], kind: TorchKind) -> tuple[_arrays.Operand, ...]:
    """Take every argument through the door."""
    return _op.open_operands(op, kind, values, DTYPES.get(torch.get_default_dtype(), BY_NAME["float32"]))
