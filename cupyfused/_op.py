"""What an op is, and the call: door -> plan -> launch -> result.

An op is data: names, a functor's CUDA text, a reference expression, and what its gradients read. Every op goes through the
functions below; nothing about one is known elsewhere.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import _arrays, _dlpack, _layout, _source
from ._arrays import Kind, Operand, device_name
from ._dtypes import Dtype, fit_number
from ._launch import Launch
from ._layout import Ints, Strided
from ._map_plan import map_plan
from ._out import check_out
from ._plan import Backend, Described
from ._result import result_dtype, result_strides
from .errors import DtypeError, OperandError, message

__all__ = ["Call", "Op", "decide", "open_operands", "run"]

_MAX_CALLS = 4096  # signatures remembered for an op; a program with more than that starts over

# How CPU arrays are computed: "reference", or "host" while tests run the kernels' own text everywhere.
cpu_impl = "reference"

IMPLS = ("auto", "cuda", "reference", "host")  # the last for tests

OPS: list[Op] = []
# Set by `_library` once PyTorch is there.
register_with_torch: Callable[[Op], None] | None = None
torch_call: Any = None
call_arrays: Any = None  # by `_array_call`, which needs this module: an import statement in each call takes 1 us
tensor_class: type = type("NoTensorYet", (), {})  # a class and no flag: Dynamo, which may trace the first call, guards on it


@dataclass(eq=False)
class Op:
    """An elementwise operator as data.

    Parameters
    ----------
    name
        Names the functor, its file, the public function, the kernels and the registered operator.
    inputs
        Arrays (the first) or arrays and numbers (the others) that gradients are taken of.
    options
        Numbers, 0-dim arrays or None; no gradient is taken of them.
    reference
        `reference(namespace, *inputs, *options)`: an expression of PyTorch or NumPy operations, in the dtype given. All it may
        ask of its arguments is whether an option is None.
    reads
        For each input, the inputs that its gradient reads.
    reads_with_options
        What every gradient reads besides, if an option is given.
    backward_numbers
        Names of further numbers that the functor's backward takes.
    rules
        `rules(as_tensors)` computes those numbers, for options given as numbers or as tensors.
    traced_reference
        `traced_reference(namespace, *inputs, *options, *numbers)`: as `reference`, with the gradients of options that are numbers,
        though in a traced graph they are 0-dim tensors; it takes the numbers of `rules` too. None: `reference` has them.
    autocast
        What `torch.autocast` does: "none", ordinary promotion; "promote", 16-bit floats count as float32 beside others; "float32",
        always.
    takes_bool
        Whether the op is defined on bool, as addition is and clamping is not.
    """

    name: str
    inputs: tuple[str, ...]
    options: tuple[str, ...]
    reference: Callable[..., Any]
    reads: Mapping[str, tuple[str, ...]]
    reads_with_options: tuple[str, ...] = ()
    backward_numbers: tuple[str, ...] = ()
    rules: Callable[[bool], tuple[float, ...]] = lambda as_tensors: ()
    traced_reference: Callable[..., Any] | None = None
    autocast: Literal["none", "promote", "float32"] = "none"
    takes_bool: bool = True
    text: str | None = None  # the functor; None: cuda_src/<name>.cuh
    calls: dict[Any, Any] = field(default_factory=dict, repr=False)  # by signature: a Call, or for PyTorch what `_short_cut` keeps
    seen: dict[Any, list[Any]] = field(default_factory=dict, repr=False)  # the last few calls, see `_short_cut`
    known_rules: dict[bool, tuple[float, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        OPS.append(self)
        if register_with_torch is not None:
            register_with_torch(self)

    @property
    def functor(self) -> str:
        """The CUDA text of the functor."""
        return self.text if self.text is not None else _source.cuda_text(f"{self.name}.cuh")

    def complete(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of a call with None for the options that were left out."""
        return (*values, *(None,) * (len(self.inputs) + len(self.options) - len(values)))

    def saved(self, wanted: Sequence[bool], has_options: bool) -> frozenset[str]:
        """Return the inputs that the wanted gradients read."""
        names = {name for asked, of in zip(wanted, self.inputs) if asked for name in self.reads[of]}
        return frozenset(names | set(self.reads_with_options) if has_options and any(wanted) else names)

    def rule(self, as_tensors: bool) -> tuple[float, ...]:
        """Return the backward numbers for options given as tensors or as numbers."""
        # Not before the first backward: the probe starts autograd's threads, those start the driver, and then no fork can use CUDA.
        if as_tensors not in self.known_rules:
            from concurrent.futures import ThreadPoolExecutor

            # In a thread of its own no mode, transform or tracer of the caller sees what is probed.
            with ThreadPoolExecutor(1) as thread:
                self.known_rules[as_tensors] = thread.submit(self.rules, as_tensors).result()
        return self.known_rules[as_tensors]

    def remember(self, key: Any, decided: Any) -> None:
        """Keep what was decided for a signature."""
        if len(self.calls) >= _MAX_CALLS:
            self.calls.clear()
        self.calls[key] = decided

    def __call__(self, *values: Any, out: Any = None, impl: str = "auto") -> Any:
        """Compute the op for any kind of array; the entry of every public function."""
        x = values[0]
        if impl == "auto" and isinstance(x, tensor_class):
            return torch_call(self, values, out, impl)
        if impl not in IMPLS:
            expected = f"one of {', '.join(IMPLS[:3])}"
            remedy = "Leave it out for the default."
            raise OperandError(message(self.name, "impl", expected=expected, got=repr(impl), remedy=remedy))
        if _is_tensor(x):
            from . import _library, _torch  # noqa: F401  # the first tensor registers the ops

            return _torch.call(self, values, out, impl)  # by its own name: Dynamo guards on a global that changes while it traces
        kind = _arrays.kind_of(x)
        if kind is not None:
            return call_arrays(self, kind, values, out, impl)
        if hasattr(x, "__dlpack_device__"):
            borrowed = [_arrays.borrow(self, name, value) for name, value in zip((*self.inputs, *self.options), values)]
            result = self(*borrowed, out=None if out is None else _arrays.borrow(self, "out", out), impl=impl)
            return out if out is not None else _arrays.hand_back(result, x)
        got = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        remedy = "Pass a torch.Tensor, cupy.ndarray, numpy.ndarray or another array with __dlpack__."
        raise DtypeError(message(self.name, self.inputs[0], expected="an array", got=got, remedy=remedy))


def _is_tensor(x: Any) -> bool:
    """Whether `x` is a tensor of PyTorch, which is never imported for anything else."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


@dataclass
class Call:
    """A call's signature, decided."""

    shape: Ints
    strides: Ints
    dtype: Dtype
    device: _arrays.Device
    backend: Backend | None  # None: the reference expression
    launch: Launch | None
    operands: tuple[Operand, ...]  # as they were described the first time; their values and addresses are not to be used
    inputs: int  # how many of the operands
    items: Ints  # operands whose value is read on the host: 0-dim CPU tensors beside CUDA arrays
    elsewhere: dict[Any, Call] = field(default_factory=dict)  # the same for saved tensors that hooks gave back with other strides
    backward: dict[Any, Any] = field(default_factory=dict)  # plans, by the gradients asked for and how the incoming one lies


def are_tensors(options: Sequence[Any]) -> bool:
    """Whether options are given, and all as tensors."""
    given = [option for option in options if option is not None]
    return len(given) > 0 and not [option for option in given if isinstance(option, (int, float))]


def open_operands(op: Op, kind: Kind, values: Sequence[Any], default_float: Dtype) -> tuple[Operand, ...]:
    """Take every argument through the door and check that they stand on one device."""
    names = (*op.inputs, *op.options)
    operands = [
        _arrays.open_door(op, kind, name, value, default_float, optional=k >= len(op.inputs))
        for k, (name, value) in enumerate(zip(names, values))
    ]
    x = operands[0]
    for k, (name, one) in enumerate(zip(names, operands)):
        if one.device is None or one.device == x.device:
            continue
        if one.device == _arrays.CPU and one.typed is not None and not one.described.array.shape:  # type: ignore[union-attr]
            operands[k] = one._replace(described=Described(one.described.dtype), device=None)  # by value, as PyTorch takes it
            continue
        expected = f"the device of {op.inputs[0]}, {device_name(x.device)}"
        raise OperandError(message(op.name, name, expected=expected, got=device_name(one.device), remedy="Move one of them first."))
    return tuple(operands)


def decide(op: Op, operands: tuple[Operand, ...], out: Operand | None, backend: Backend | None, dtype: Dtype | None = None) -> Call:
    """Decide everything about a call: its result's dtype (unless it is given), shape and strides, and the launch."""
    dtype = dtype or result_dtype(op, operands)
    inputs, options = operands[: len(op.inputs)], operands[len(op.inputs) :]
    arrays = [(name, one.described.array) for name, one in zip(op.inputs, inputs) if one.described.array]
    shape = _layout.broadcast_shapes([array.shape for _, array in arrays])
    if shape is None:
        got = ", ".join(f"{name} {array.shape}" for name, array in arrays)
        raise OperandError(
            message(op.name, "operands", expected="shapes that broadcast together", got=got, remedy="Reshape one of them.")
        )
    device = operands[0].device
    assert device is not None
    strides = result_strides(shape, inputs, options, device[0] == _dlpack.CPU)
    if out is not None:
        check_out(op, out, operands, shape, dtype, device)
        assert out.described.array is not None
        strides = out.described.array.strides
    launch = None
    if backend is not None:
        result = Described(dtype, Strided(shape, strides), out.described.alignment if out else 0)
        launch = map_plan(op, shape, [result, *(one.described for one in operands)], backend)
    items = tuple(k for k, one in enumerate(operands) if one.device is None and hasattr(one.value, "item"))
    remembered = tuple(one._replace(value=None, address=0) for one in operands)
    return Call(shape, strides, dtype, device, backend, launch, remembered, len(op.inputs), items)


def run(op: Op, call: Call, stream: int, result: int, slots: Sequence[Any]) -> None:
    """Launch a forward call with an address or number for each operand."""
    assert call.launch is not None
    try:
        call.launch(stream, result, *slots)
    except (struct.error, OverflowError):
        call.launch(stream, result, *fitted(op, call, slots))


def fitted(op: Op, call: Call, slots: Sequence[Any]) -> list[Any]:
    """Bring numbers into the range of the arithmetic: as inputs they overflow or wrap, as integer bounds they must fit."""
    result = list(slots)
    for k, one in enumerate(call.operands):
        if one.typed is not None and one.device is None and not hasattr(slots[k], "dtype"):
            number = fit_number(slots[k], call.dtype)
            if k >= len(op.inputs) and not call.dtype.is_floating and number != slots[k]:
                name = op.options[k - len(op.inputs)]
                raise OperandError(
                    message(
                        op.name,
                        name,
                        expected=f"a number that {call.dtype.name} holds",
                        got=f"{slots[k]}",
                        remedy="Pass a bound in range, or None.",
                    )
                )
            result[k] = number
    return result


def check_on_cuda(op: Op, device: _arrays.Device) -> None:
    """Refuse impl="cuda" where it cannot be had."""
    if device[0] != _dlpack.CUDA:
        raise OperandError(
            message(
                op.name,
                "impl",
                expected="CUDA arrays with impl='cuda'",
                got=f"arrays on {device_name(device)}",
                remedy="Move them to a CUDA device, or leave impl out.",
            )
        )


def choose_backend(op: Op, impl: str, device: _arrays.Device) -> Backend | None:
    """Return where a call runs, None for the reference expression; never a silent fallback."""
    on_cuda = device[0] == _dlpack.CUDA
    if impl == "auto":
        impl = "cuda" if on_cuda else cpu_impl
    if impl == "reference":
        return None
    if impl == "cuda":
        check_on_cuda(op, device)
        return _arrays.cuda_backend(device[1])
    if on_cuda:
        raise OperandError(
            message(
                op.name,
                "impl",
                expected="CPU arrays with impl='host'",
                got=f"arrays on {device_name(device)}",
                remedy="Leave impl out.",
            )
        )
    from . import _host

    return _host.backend
