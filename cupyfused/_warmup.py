"""Compiling ahead: every kernel that calls of some ops with some dtypes can ask for goes into the cache, without a GPU too.

`import cupyfused` imports this file, so what only compiling needs is imported in its functions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import _kernel
from ._dtypes import BY_NAME, Dtype
from ._op import OPS, Op
from ._source import Variant
from .errors import CupyfusedError, OperandError, message

__all__ = ["DTYPES", "Warmed", "warmup"]

DTYPES = ("float32", "float16", "bfloat16", "uint8")
_PLAIN_LINES = 10  # of progress where rich is not installed


class Warmed(NamedTuple):
    """How many kernels `warmup` compiled, and how many were in the cache already."""

    compiled: int
    found: int


def warmup(
    ops: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    *,
    dtypes: Any = DTYPES,
    arch: str | Sequence[str] | None = None,
    large: bool = False,
    progress: bool = False,
) -> Warmed:
    """Compile every kernel that calls of these ops with these dtypes can ask for, and keep them in the cache.

    Parameters
    ----------
    ops : name or public function, or several
        None: every op.
    dtypes : name, PyTorch or NumPy dtype, or several
        Those of the arrays, in any combination, with numbers beside them; what they promote to is included.
    arch : str or several
        GPU architectures such as "sm_90". None: those of the GPUs that this process may use. No GPU is needed to compile for one.
    large
        Whether to compile also for arrays of more than 2^31 elements, strides as wide, or more than 8 dims that cannot be
        walked as one.
    progress
        Whether to draw a progress bar, or without rich to print a line now and then.

    Returns
    -------
    Warmed
        `compiled` and `found`: how many kernels were compiled, and how many were there already.

    Raises
    ------
    OperandError
        A ValueError: an op, dtype or architecture that does not exist, or no `arch` where there is no GPU.
    CudaError
        CuPy or NVRTC is missing; the message names the command that brings it.
    CompileError
        This NVRTC does not compile for that architecture.
    CupyfusedError
        The cache folder cannot be written to.

    Notes
    -----
    The cache serves this version of cupyfused and this version of NVRTC, and only if its folder belongs to the user who runs.
    Nothing is loaded into a GPU, and no CUDA context is made: a call loads the one to three kernels that it needs itself, while a
    stream captures too. Kernels of gradients are compiled where PyTorch is installed, for options that are numbers. On a slow core
    a kernel takes 0.1 to 0.5 s; the default is some 1,100 of them for an architecture, `large` 4 % more.

    Examples
    --------
    >>> import cupyfused
    >>> warmed = cupyfused.warmup("fused_scale_bias", dtypes="int32", arch="sm_90")
    >>> warmed.compiled + warmed.found
    12
    """
    from . import _cache, _variants

    _kernel.nvrtc_version()  # what is missing is said first
    variants = _variants.table(_named_ops(ops), _named_dtypes(dtypes), _numbers, large)
    entries = {_kernel.cache_key(variant, one): (variant, one) for one in _architectures(arch) for variant in variants}
    missing = {key: entry for key, entry in entries.items() if _cache.load(key) is None}
    bar = _bar(len(missing)) if progress and missing else contextlib.nullcontext(lambda: None)
    with contextlib.closing(_compiled(missing)) as compiled, bar as advance:
        for key, code in compiled:
            try:
                _cache.write(key, code)
            except OSError as error:
                remedy = f"Set {_cache.ENVIRONMENT_VARIABLE} to a folder of yours."
                raise CupyfusedError(f"warmup: compiled kernels cannot be kept: {error}. {remedy}") from error
            advance()
    return Warmed(len(missing), len(entries) - len(missing))


# ---- arguments ----------------------------------------------------------------------------------------------------------


def _listed(argument: str, value: Any) -> list[Any]:
    listed = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    if not listed:
        raise OperandError(message("warmup", argument, expected="one at least", got="none", remedy="Leave it out for the default."))
    return listed


def _named_ops(ops: Any) -> list[Op]:
    known = {op.name: op for op in OPS}
    names = (
        list(known)
        if ops is None
        else [one if isinstance(one, str) else getattr(one, "__name__", one) for one in _listed("ops", ops)]
    )
    for name in names:
        if name not in known:
            remedy = "Leave it out for all of them."
            raise OperandError(message("warmup", "ops", expected=f"of {', '.join(known)}", got=repr(name), remedy=remedy))
    return [known[name] for name in dict.fromkeys(names)]


def _named_dtypes(dtypes: Any) -> list[Dtype]:
    names = {
        getattr(one, "__name__", str(one).rpartition(".")[2]): one for one in _listed("dtypes", dtypes)
    }  # classes of NumPy have a name, and PyTorch's and NumPy's dtypes are printed so
    for name, one in names.items():
        if name not in BY_NAME:
            remedy = "Name those of your arrays."
            raise OperandError(message("warmup", "dtypes", expected=f"of {', '.join(BY_NAME)}", got=repr(one), remedy=remedy))
    return [BY_NAME[name] for name in names]


def _numbers(op: Op) -> tuple[float, ...] | None:
    """Return the numbers of an op's backward, which PyTorch is asked for; without it no gradient is taken."""
    if importlib.util.find_spec("torch") is None:
        return None
    return op.rule(as_tensors=False)


def _architectures(arch: Any) -> list[str]:
    """Return the architectures that loading will ask the cache for."""
    if arch is None:
        return list(dict.fromkeys(_kernel.architecture(one) for one in _capabilities()))
    found = []
    for one in _listed("arch", arch):
        parsed = re.fullmatch(r"sm_(\d{2,3})", one) if isinstance(one, str) else None
        if parsed is None:
            remedy = "`python -m cupyfused doctor` prints that of a GPU."
            raise OperandError(message("warmup", "arch", expected="names such as 'sm_90'", got=repr(one), remedy=remedy))
        found.append(_kernel.architecture(int(parsed[1])))
    return list(dict.fromkeys(found))


def _capabilities() -> list[int]:
    """Return the compute capabilities of the GPUs that this process may use."""
    cupy = _kernel.import_cupy()
    count, problem = 0, ""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        problem = f" ({error})"
    if not count:
        remedy = "Pass that of the GPU where the kernels will run, such as sm_90 for an H200."
        expected = "an architecture, since there is no GPU here"
        raise OperandError(message("warmup", "arch", expected=expected, got=f"none{problem}", remedy=remedy))
    return [int(cupy.cuda.Device(index).compute_capability) for index in range(count)]


# ---- compiling ----------------------------------------------------------------------------------------------------------


def _compiled(missing: Mapping[str, tuple[Variant, str]]) -> Generator[tuple[str, bytes], None, None]:
    """Compile each entry and yield its key and code, in whatever order they are done."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    pool = ThreadPoolExecutor()  # CuPy lets other threads run while NVRTC compiles, and NVRTC takes several programs at once
    try:
        keys = {pool.submit(_kernel.compile_cubin, variant, arch): key for key, (variant, arch) in missing.items()}
        for done in as_completed(keys):
            yield keys[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """Show progress; yields what to call after each kernel."""
    try:
        from rich import progress
    except ImportError:
        yield _plain_lines(total)
        return
    with progress.Progress(*progress.Progress.get_default_columns(), progress.MofNCompleteColumn()) as bar:
        task = bar.add_task("Compiling kernels", total=total)
        yield lambda: bar.advance(task)


def _plain_lines(total: int) -> Callable[[], None]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == total or done % -(-total // _PLAIN_LINES) == 0:
            print(f"{done} of {total} kernels compiled", flush=True)

    return advance
