"""python -m cupyfused demo | doctor | bench | warmup."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import __version__, _cache, _config, _op, _warmup
from ._dtypes import BY_NAME
from .errors import CupyfusedError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments
        What follows `python -m cupyfused`; None takes it from `sys.argv`.

    Returns
    -------
    int
        The exit code: 0 if the command did what it is for, else 1. Arguments that do not parse leave by `SystemExit(2)`.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    return int(options.command(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupyfused", description="Fused GPU array operators for Python.")
    parser.add_argument("--version", action="version", version=f"cupyfused {__version__}", help="Print the version and leave.")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_doctor(commands)
    _add_warmup(commands)
    _add_bench(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = "Train a small denoiser on a photograph twice, with composed PyTorch and with the fused operator, and compare."
    demo = commands.add_parser("demo", help=told, description=told)
    demo.add_argument("--steps", type=_positive, default=60, metavar="N", help="Training steps of each run (default: %(default)s).")
    device = "One of auto, cpu, cuda and cuda:1; auto is cuda where kernels run (default: %(default)s)."
    demo.add_argument("--device", default="auto", metavar="D", help=device)
    folder = "Folder for the picture (default: %(default)s)."
    demo.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help=folder)
    demo.set_defaults(command=_demo)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = "Print what is installed, which path each kind of array takes, and the command that mends what is missing."
    doctor = commands.add_parser("doctor", help=told, description=f"{told} Exit code 1 if CUDA kernels cannot run.")
    doctor.set_defaults(command=_doctor)


def _add_warmup(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = "Compile the kernels that calls will ask for, and keep them in the cache; needs no GPU."
    warmup = commands.add_parser("warmup", help=told, description=f"{told} Exit code 1 if NVRTC or a writable folder is missing.")
    gpus = "GPU architectures such as sm_90 (default: those of the GPUs here)."
    warmup.add_argument("--arch", nargs="+", metavar="ARCH", help=gpus)
    arrays = f"Dtypes of the arrays, in any combination (default: {' '.join(_warmup.DTYPES)})."
    warmup.add_argument("--dtype", nargs="+", choices=list(BY_NAME), default=_warmup.DTYPES, metavar="DTYPE", help=arrays)
    names = [op.name for op in _op.OPS]
    warmup.add_argument("--op", nargs="+", choices=names, metavar="NAME", help=f"Of {' '.join(names)} (default: all).")
    warmup.add_argument("--large", action="store_true", help="Kernels for more than 2^31 elements too.")
    warmup.set_defaults(command=_fill_cache)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = "Measure the operator beside its peers on this machine: tables, JSON and pictures."
    more = "What needs a GPU, a compiler or a package that is not there is named and left out. Exit code 1 if values are wrong."
    bench = commands.add_parser("bench", help=told, description=f"{told} {more}")
    bench.add_argument("--quick", action="store_true", help="Fewer layouts, dtypes and sizes, no nvcc.")
    folder = "Folder for bench.json and the pictures (default: %(default)s)."
    bench.add_argument("--output", type=Path, default=Path("bench-output"), metavar="DIR", help=folder)
    only = "Sections to run, separated by commas: layouts, latency, host, cold, peers, cpu (default: all)."
    bench.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="SECTIONS", help=only)
    elements = "Elements of the largest arrays (default: 2^27, 2^25 with --quick, or what fits into the GPU's memory)."
    bench.add_argument("--elements", type=_positive, metavar="N", help=elements)
    bench.set_defaults(command=_bench)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _demo(options: argparse.Namespace) -> int:
    try:
        from . import _demo as demo
    except (ImportError, OSError) as error:  # OSError: a PyTorch whose own libraries do not load
        print(f"The demo needs PyTorch, matplotlib and rich ({error}): pip install 'cupyfused[demo,torch]'", file=sys.stderr)
        return 1
    try:
        return demo.run(options.steps, options.device, options.output)
    except (CupyfusedError, OSError) as error:  # OSError: a folder that cannot be written, a matplotlib without its photograph
        print(error, file=sys.stderr)
        return 1


def _bench(options: argparse.Namespace) -> int:
    try:
        from .bench.run import run
    except (ImportError, OSError) as error:  # as for the demo
        print(f"The benchmark needs PyTorch, matplotlib and rich ({error}): pip install 'cupyfused[demo,torch]'", file=sys.stderr)
        return 1
    try:
        return run(options.quick, options.output, options.only, options.elements)
    except (CupyfusedError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _doctor(options: argparse.Namespace) -> int:
    _config.show_config()
    return 0 if _config.diagnose(_config.gather()).kernels_run else 1


def _fill_cache(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    try:
        print(f"kernel cache: {_cache.folder()}")
        warmed = _warmup.warmup(options.op, dtypes=options.dtype, arch=options.arch, large=options.large, progress=True)
    except (CupyfusedError, OSError) as error:  # OSError: no home folder to put the cache in
        print(error, file=sys.stderr)
        return 1
    print(f"{warmed.compiled} kernels compiled in {time.perf_counter() - start:.1f} s, {warmed.found} were there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
