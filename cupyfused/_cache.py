"""Where compiled kernels live on disk: one folder a user, written atomically, checked when read.

For a disk that is full, read-only, shared or gone only `write` raises: calls keep the kernel in memory then, with one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

import platformdirs

__all__ = ["folder", "is_writable", "load", "store", "write"]

ENVIRONMENT_VARIABLE = "CUPYFUSED_CACHE_DIR"
_DIGEST_BYTES = 32
_warned = False


def folder() -> Path:
    """Return the cache folder: `CUPYFUSED_CACHE_DIR`, else the user's cache folder of this system."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    try:
        path = Path(platformdirs.user_cache_dir("cupyfused", appauthor=False))
    except RuntimeError as error:  # a user without a home folder
        raise FileNotFoundError(str(error)) from error
    if not path.is_absolute():  # the same, in older releases
        raise FileNotFoundError(f"no home folder to put {path} in")
    return path


def is_writable() -> bool:
    """Whether kernels compiled here outlive the process."""
    try:
        _prepare_folder()
        with tempfile.TemporaryFile(dir=folder()):
            return True
    except OSError:
        return False


def load(key: str) -> bytes | None:
    """Return what was stored under `key`; None where there is nothing, or nothing that can be trusted."""
    try:
        path = folder() / key
        if not (_is_private(folder()) and _is_private(path)):
            return None
        content = path.read_bytes()
    except OSError:
        return None
    digest, value = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return value if _digest(key, value) == digest else None


def store(key: str, value: bytes) -> None:
    """Keep `value` under `key` for later processes if that can be."""
    try:
        write(key, value)
    except OSError as error:
        _warn_once(error)


def write(key: str, value: bytes) -> None:
    """Keep `value` under `key`, or raise OSError; a reader sees all of it or nothing."""
    temporary = None
    try:
        _prepare_folder()
        descriptor, temporary = tempfile.mkstemp(dir=folder(), prefix=".writing-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(key, value) + value)
        os.replace(temporary, folder() / key)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise


def _digest(key: str, value: bytes) -> bytes:
    """Of the key too: an entry under the name of another is none."""
    return hashlib.sha256(key.encode() + b"\0" + value).digest()


def _prepare_folder() -> None:
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder()):
        raise PermissionError(f"{folder()} belongs to another user, or others may write to it")


def _is_private(path: Path) -> bool:
    """Machine code is read only from what nobody else could have written. Windows' user folders are private already."""
    if os.name == "nt":
        return path.exists()
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _warn_once(error: OSError) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"cupyfused keeps compiled kernels in memory only: its cache folder cannot be used ({error}). "
            f"Set {ENVIRONMENT_VARIABLE} to a folder that you can write to.",
            stacklevel=2,
        )
