"""PyTorch: the array kind, and the routes by which a call reaches the kernels with its gradients.

A call takes one of three routes, chosen in `call`:

- the short cut: plain tensors in plain eager mode go straight to the plan, through an `autograd.Function` if a gradient is asked
  for. It is taken only if nothing is watching or transforming the call, see `is_plain`;
- functorch transforms and forward-mode duals compute the composed expression, which PyTorch differentiates;
- torch.compile, tracing, fake tensors and tensor subclasses go through `torch.ops.cupyfused`, see `_library`.

Loaded when the first tensor comes; importing cupyfused does not import torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from . import _arrays, _dlpack, _op
from ._arrays import Device
from ._dtypes import BY_NAME, Dtype
from ._gates import is_plain, is_transformed, is_watched, needs_gradient
from ._layout import Ints
from ._op import Call
from ._out import open_out
from .errors import CudaError, OperandError, message

if TYPE_CHECKING:
    from ._op import Op

__all__ = [
    "DTYPES",
    "TORCH",
    "TORCH_DTYPES",
    "call",
    "compute_reference",
    "eager_forward",
    "find",
    "is_plain",
    "normalised",
    "runs_kernel",
    "signature",
]

DTYPES: dict[torch.dtype, Dtype] = {getattr(torch, name): dtype for name, dtype in BY_NAME.items()}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in BY_NAME}
_DEVICE_TYPES: dict[str, Any] = {"cpu": _dlpack.CPU, "cuda": _dlpack.CUDA}


class TorchKind:
    """torch.Tensor."""

    name = "torch.Tensor"

    def __init__(self, reads_memory: bool):
        self._reads_memory = reads_memory

    def refuses(self, array: Tensor) -> str | None:
        if array.is_nested:
            return "a nested tensor"
        if array.layout != torch.strided:
            return f"a tensor of layout {array.layout}"
        if array.is_quantized:
            return "a quantised tensor"
        return None if array.dtype in DTYPES else str(array.dtype)

    def read(self, array: Tensor) -> _dlpack.Descriptor:
        """Read the DLPack descriptor, or what the tensor says of itself where no kernel will touch its memory."""
        device = (_DEVICE_TYPES.get(array.device.type, array.device.type), array.device.index or 0)
        shape, strides = tuple(array.shape), array.stride()
        if not self._reads_memory or array.device.type not in _DEVICE_TYPES:
            return _dlpack.Descriptor(0, shape, strides, DTYPES[array.dtype], device)
        told = _dlpack.read(to_dlpack(array.detach()))  # detached: an export of a tensor that requires grad is refused
        # The export rewrites the strides of dims of extent 1, on which the strides of results depend.
        kept = tuple(own if extent == 1 else stride for own, stride, extent in zip(strides, told.strides, told.shape))
        return told._replace(strides=kept)

    def address(self, array: Tensor) -> int:
        return array.data_ptr()

    def empty(self, shape: Ints, strides: Ints, dtype: Dtype, device: Device) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=TORCH_DTYPES[dtype.name], device=_arrays.device_name(device))

    def stream(self, device: Device) -> int:
        return _stream(device[1]) if device[0] == _dlpack.CUDA else 0


TORCH, _TORCH_UNREAD = TorchKind(reads_memory=True), TorchKind(reads_memory=False)

_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _stream(device: int) -> int:
    """Return PyTorch's current stream of the calling thread: a private name where there is one, 4 us by the public one."""
    if _raw_stream is not None:
        return _raw_stream(device)
    return torch.cuda.current_stream(device).cuda_stream


# ---- the routes -------------------------------------------------------------------------------------------------------


def call(op: Op, values: Sequence[Any], out: Tensor | None, impl: str) -> Tensor:
    """Compute an op for a torch.Tensor, by whichever route is right."""
    if torch.compiler.is_compiling():
        from ._library import traced_call

        return traced_call(op, values)
    try:
        return _route(op, values, out, impl)
    except (RuntimeError, NotImplementedError):
        _open(op, values, _TORCH_UNREAD)  # what PyTorch refuses, a tensor without strides say, has an error of ours that names it
        raise


def _route(op: Op, values: Sequence[Any], out: Tensor | None, impl: str) -> Tensor:
    if out is not None:
        return _call_out(op, values, out, impl)
    values = normalised(values)
    if not is_watched() and is_plain(values):
        if not runs_kernel(op, values[0], impl):
            check_options(op, values)
            return compute_reference(op, values)
        if needs_gradient(values):
            return _function(op).apply(*values, impl)  # type: ignore[no-any-return]
        return eager_forward(op, values, impl)[0]
    check_options(op, values)
    if is_transformed() or impl == "reference":
        return compute_reference(op, values)
    _open(op, values, _TORCH_UNREAD)  # for its checks
    from ._library import traced_call

    return traced_call(op, values)


@functools.cache
def _function(op: Op) -> Any:
    return importlib.import_module("cupyfused._autograd").function(op)


def runs_kernel(op: Op, x: Tensor, impl: str) -> bool:
    """Whether a kernel computes this call, else the composed expression."""
    if impl == "auto":
        return x.is_cuda or (x.device.type == "cpu" and _op.cpu_impl == "host")
    if impl == "reference":
        return False
    if not x.is_cuda and x.device.type != "cpu":
        raise CudaError(
            message(op.name, "impl", expected="CUDA tensors", got=f"a tensor on {x.device}", remedy="Pass impl='reference'.")
        )
    return True


def check_options(op: Op, values: Sequence[Any]) -> None:
    """Refuse an option that asks for a gradient: it would get none."""
    for name, value in zip(op.options, values[len(op.inputs) :]):
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            remedy = f"Pass {name}.detach(); gradients are taken of {', '.join(op.inputs)} only."
            raise OperandError(
                message(op.name, name, expected="a bound without gradient", got="one with requires_grad", remedy=remedy)
            )


# ---- forward ------------------------------------------------------------------------------------------------------------


def _open(op: Op, values: Sequence[Any], kind: TorchKind = TORCH) -> tuple[_arrays.Operand, ...]:
    return _op.open_operands(op, kind, values, DTYPES.get(torch.get_default_dtype(), BY_NAME["float32"]))


def normalised(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values with NumPy scalars as numbers, which is what they count as beside a tensor."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is float or value is None or kind is int or kind is torch.nn.Parameter or kind is bool:
            continue
        numbers = [None if isinstance(one, Tensor) else _arrays.as_number(one) for one in values]
        return tuple(one if number is None else number for one, number in zip(values, numbers))
    return values


def signature(values: Sequence[Any], head: tuple[Any, ...], memory: bool = True) -> tuple[tuple[Any, ...], list[Any]]:
    """Return a call's key and, for each operand, its address or number."""
    key: list[Any] = [head, torch.get_default_dtype()]
    slots: list[Any] = []
    for value in values:
        if value is None:
            key.append(None)
            slots.append(0)
        elif isinstance(value, Tensor):
            address = value.data_ptr() if memory else 0
            key += (value.dtype, value.shape, value.stride(), value.get_device() if memory else value.device, address & 15)
            slots.append(address)
        else:
            key.append(type(value))
            slots.append(value)
    return tuple(key), slots


def find(op: Op, values: Sequence[Any], impl: str, key: tuple[Any, ...], dtype: Dtype | None = None) -> Call:
    """Return the decided call of a signature; only one not seen before goes through the door."""
    found = op.calls.get(key)
    if found is None:
        kind = _TORCH_UNREAD if impl == "reference" else TORCH
        operands = _open(op, values, kind)
        device = operands[0].device
        assert device is not None
        backend = _op.choose_backend(op, impl, device)
        found = op.remember(key, _op.decide(op, operands, None, backend, dtype))
    return found


def eager_forward(op: Op, values: Sequence[Any], impl: str, dtype: Dtype | None = None) -> tuple[Tensor, Call]:
    """Launch the forward kernel on plain tensors and numbers; `dtype` overrides the promoted one."""
    key, slots = signature(values, (impl, _op.cpu_impl, dtype))
    found = find(op, values, impl, key, dtype)
    x = values[0]
    if found.shape == x.shape and found.strides == x.stride() and DTYPES[x.dtype] is found.dtype:
        result = torch.empty_like(x)
    else:
        result = torch.empty_strided(found.shape, found.strides, dtype=TORCH_DTYPES[found.dtype.name], device=x.device)
    if found.launch is not None:
        for k in found.items:
            slots[k] = values[k].item()
        _op.run(op, found, TORCH.stream(found.device), result.data_ptr(), slots)
    return result, found


def _call_out(op: Op, values: Sequence[Any], out: Any, impl: str) -> Tensor:
    if needs_gradient((*values, out)):
        remedy = "Call it without out=, or under torch.no_grad()."
        raise OperandError(
            message(op.name, "out", expected="no gradient to be asked for", got="an input or out with requires_grad", remedy=remedy)
        )
    opened = open_out(op, TORCH if isinstance(out, Tensor) and is_plain((out,)) else _TORCH_UNREAD, out)
    if is_watched() or not is_plain((*values, out)):
        remedy = "Call it without out=."
        raise OperandError(
            message(op.name, "out", expected="a plain eager call", got="a traced, transformed or subclassed one", remedy=remedy)
        )
    values = normalised(values)
    operands = _open(op, values)
    device = operands[0].device
    assert device is not None
    backend = _op.choose_backend(op, impl, device) if runs_kernel(op, values[0], impl) else None
    decided = _op.decide(op, operands, opened, backend)
    if decided.launch is not None:
        slots = [values[k].item() if k in decided.items else one.address or one.value or 0 for k, one in enumerate(operands)]
        _op.run(op, decided, TORCH.stream(device), out.data_ptr(), slots)
    elif backend is None:
        out.copy_(compute_reference(op, values))
    torch.autograd.graph.increment_version(out)
    return out  # type: ignore[no-any-return]


# ---- the composed expression --------------------------------------------------------------------------------------------

_COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def compute_reference(op: Op, values: Sequence[Any], dtype: Dtype | None = None) -> Tensor:
    """Compute the op by PyTorch operations, differentiable: 16-bit floats in float32 and rounded once, like the kernels."""
    values = normalised(values)
    key, _ = signature(values, ("reference", None, dtype), memory=False)
    found = find(op, values, "reference", key, dtype)
    result = TORCH_DTYPES[found.dtype.name]
    compute = _COMPUTE.get(result, result)
    cast = [value.to(compute) if isinstance(value, Tensor) else value for value in _op.fitted(op, found, values)]
    y: Tensor = op.reference(torch, *cast).to(result)
    if y.stride() != found.strides and not is_transformed():
        # A 16-bit operand with gaps was made dense by the cast, which can change what the composed expression would return.
        y = torch.empty_strided(found.shape, found.strides, dtype=result, device=y.device).copy_(y)
    return y
