"""The cache on disk: what comes back is what was stored or nothing, and no disk, however bad, makes a call fail."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from cupyfused import _cache

KEY = "0123456789abcdef.cubin"
POSIX = pytest.mark.skipif(os.name == "nt", reason="modes and owners are POSIX; a user's folders on Windows are private already")
UNPRIVILEGED = pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads and writes whatever the mode says")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet, and no warning given yet."""
    place = tmp_path / "cache"
    monkeypatch.setenv("CUPYFUSED_CACHE_DIR", str(place))
    monkeypatch.setattr(_cache, "_warned", False)
    return place


def raises(error: OSError) -> Callable[..., None]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    return refuse


def assert_stores_nothing_with_one_warning() -> None:
    """Storing warns once, naming the remedy, and loading finds nothing; neither raises."""
    with pytest.warns(UserWarning, match="CUPYFUSED_CACHE_DIR") as told:
        _cache.store(KEY, b"one")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _cache.store(KEY, b"two")
        assert _cache.load(KEY) is None


# ---- what works ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 100_000])
def test_what_was_stored_comes_back(folder: Path, size: int) -> None:
    value = secrets.token_bytes(size)
    assert _cache.load(KEY) is None
    _cache.store(KEY, value)
    assert _cache.load(KEY) == value
    assert [path.name for path in folder.iterdir()] == [KEY], "nothing half-written stays behind"


def test_a_later_value_takes_the_place_of_an_earlier_one() -> None:
    values = [secrets.token_bytes(size) for size in (50, 5000, 3)]
    for value in values:
        _cache.store(KEY, value)
        assert _cache.load(KEY) == value


@pytest.mark.parametrize("name", ["Kätzchen и 猫 🐈", "with spaces", "a'b$c"])
def test_folders_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CUPYFUSED_CACHE_DIR", str(tmp_path / name / "deeper"))
    value = secrets.token_bytes(200)
    _cache.store(KEY, value)
    assert _cache.load(KEY) == value
    assert _cache.is_writable()


def test_without_the_variable_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for unset in (lambda: monkeypatch.delenv("CUPYFUSED_CACHE_DIR"), lambda: monkeypatch.setenv("CUPYFUSED_CACHE_DIR", "")):
        unset()
        assert _cache.folder() == tmp_path / "xdg" / "cupyfused" or sys.platform != "linux"


@pytest.mark.parametrize("found", [None, "~/.cache/cupyfused"], ids=["refused", "left as it is"])
def test_a_user_without_a_home_gets_no_folder_of_that_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: str | None
) -> None:
    """A container's user may have neither HOME nor an entry in the user database; releases of platformdirs differ there."""

    def user_cache_dir(*names: object, **options: object) -> str:
        if found is None:
            raise RuntimeError("could not determine the home directory")
        return found

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUPYFUSED_CACHE_DIR")
    monkeypatch.setattr(_cache.platformdirs, "user_cache_dir", user_cache_dir)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUPYFUSED_CACHE_DIR", category=UserWarning)
        _cache.store(KEY, b"value")
    assert _cache.load(KEY) in (None, b"value")
    assert _cache.is_writable() in (False, True)
    assert not list(tmp_path.iterdir()), "kernels would lie wherever a process happened to start"


@POSIX
def test_nobody_else_may_write_to_what_is_made(folder: Path) -> None:
    before = os.umask(0)
    try:
        _cache.store(KEY, b"value")
    finally:
        os.umask(before)
    for path in (folder, folder / KEY):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


WRITER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cache_alone", sys.argv[1])  # the module alone: NumPy takes longer than this test
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
values = [bytes([number]) * (20_000 + number) for number in range(8)]
print("ready", flush=True)
sys.stdin.readline()
for turn in range(60):
    cache.store(sys.argv[2], values[int(sys.argv[3])])
    assert cache.load(sys.argv[2]) in values
"""


def test_eight_processes_store_and_load_one_key(folder: Path) -> None:
    """Each loads all of some value, whoever replaces it meanwhile."""
    command = [sys.executable, "-W", "error", "-c", WRITER, _cache.__file__, KEY]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, str(number)], **pipes) for number in range(8)]  # type: ignore[call-overload]
    assert [one.stdout.readline() for one in writers] == ["ready\n"] * 8
    for one in writers:
        one.stdin.write("go\n")
        one.stdin.flush()
    errors = [one.communicate()[1] for one in writers]
    assert [one.returncode for one in writers] == [0] * 8, errors
    assert _cache.load(KEY) in [bytes([number]) * (20_000 + number) for number in range(8)]
    assert [path.name for path in folder.iterdir()] == [KEY]


# ---- entries that cannot be trusted -------------------------------------------------------------------------------------


def test_any_changed_byte_is_a_miss(folder: Path) -> None:
    _cache.store(KEY, secrets.token_bytes(100))
    whole = (folder / KEY).read_bytes()
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1 + secrets.randbelow(255)
        (folder / KEY).write_bytes(changed)
        assert _cache.load(KEY) is None, place
    (folder / KEY).write_bytes(whole)
    assert _cache.load(KEY) is not None


@pytest.mark.parametrize("kept", [0, 10, 32, 40, 131])
def test_a_truncated_entry_is_a_miss(folder: Path, kept: int) -> None:
    _cache.store(KEY, secrets.token_bytes(100))
    (folder / KEY).write_bytes((folder / KEY).read_bytes()[:kept])
    assert _cache.load(KEY) is None


def test_a_foreign_file_is_a_miss(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / KEY).write_bytes(b"not a kernel at all" * 10)
    assert _cache.load(KEY) is None


def test_an_entry_under_the_name_of_another_is_a_miss(folder: Path) -> None:
    """A kernel for other dtypes would run without complaint and return nonsense."""
    _cache.store(KEY, b"value")
    (folder / KEY).rename(folder / "another.cubin")
    assert _cache.load("another.cubin") is None


def test_a_bad_entry_is_replaced(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / KEY).write_bytes(b"damaged")
    _cache.store(KEY, b"mended")
    assert _cache.load(KEY) == b"mended"


def test_a_folder_in_the_place_of_an_entry_is_a_miss(folder: Path) -> None:
    (folder / KEY).mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    assert _cache.load(KEY) is None
    assert_stores_nothing_with_one_warning()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_an_entry_that_cannot_be_read_is_a_miss(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    _cache.store(KEY, b"value")
    monkeypatch.setattr(Path, "read_bytes", raises(OSError(code, os.strerror(code))))
    assert _cache.load(KEY) is None


@UNPRIVILEGED
def test_an_entry_without_any_permission_is_a_miss(folder: Path) -> None:
    _cache.store(KEY, b"value")
    (folder / KEY).chmod(0)
    assert _cache.load(KEY) is None


@POSIX
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_can_write_to_is_a_miss(folder: Path, mode: int) -> None:
    _cache.store(KEY, b"value")
    (folder / KEY).chmod(mode)
    assert _cache.load(KEY) is None
    (folder / KEY).chmod(0o600)
    assert _cache.load(KEY) == b"value"


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    assert not _cache.is_writable()
    assert_stores_nothing_with_one_warning()
    assert not list(folder.iterdir())


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_nothing_is_read_from_a_folder_that_others_can_write_to(folder: Path, mode: int) -> None:
    """Whoever may write to the folder can put a file of their choice, or a link to an older one of ours, in an entry's place."""
    _cache.store(KEY, b"value")
    folder.chmod(mode)
    assert _cache.load(KEY) is None


@POSIX
def test_an_entry_of_another_user_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    _cache.store(KEY, b"value")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert _cache.load(KEY) is None
    assert_stores_nothing_with_one_warning()


# ---- disks that fail ----------------------------------------------------------------------------------------------------


@UNPRIVILEGED
def test_a_read_only_folder_stores_nothing(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o500)
    assert not _cache.is_writable()
    assert_stores_nothing_with_one_warning()


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CUPYFUSED_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert not _cache.is_writable()
    assert_stores_nothing_with_one_warning()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOENT])
def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(Path, "mkdir", raises(OSError(code, os.strerror(code))))
    assert not _cache.is_writable()
    assert_stores_nothing_with_one_warning()


@pytest.mark.parametrize("name", ["mkstemp", "fdopen", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_stores_nothing_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    place = _cache.tempfile if name == "mkstemp" else _cache.os
    monkeypatch.setattr(place, name, raises(OSError(code, os.strerror(code))))
    assert_stores_nothing_with_one_warning()
    assert not list(folder.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full, which is always full, is of Linux")
@pytest.mark.parametrize("buffering", [0, -1], ids=["at the write", "when it is closed"])
def test_a_disk_that_fills_up_keeps_the_earlier_entry(folder: Path, monkeypatch: pytest.MonkeyPatch, buffering: int) -> None:
    _cache.store(KEY, b"earlier")
    with open("/dev/full", "wb", buffering) as full, monkeypatch.context() as patch:
        patch.setattr(_cache.os, "fdopen", lambda descriptor, mode: os.close(descriptor) or full)
        with pytest.warns(UserWarning, match="No space left on device.*CUPYFUSED_CACHE_DIR"):
            _cache.store(KEY, b"later")
    assert _cache.load(KEY) == b"earlier"
    assert [path.name for path in folder.iterdir()] == [KEY]


def test_a_file_that_cannot_be_taken_away_again_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache.os, "replace", raises(OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr(Path, "unlink", raises(OSError(errno.EIO, "Input/output error")))
    assert_stores_nothing_with_one_warning()
