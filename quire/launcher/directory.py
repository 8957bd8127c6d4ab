"""A stack's private directory; removes the directories of stacks that were killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

_PREFIX = "quire-stack-"
# A directory has this prefix until it is locked, so that it is not removed.
_UNLOCKED_PREFIX = f".{_PREFIX}"
# A Unix socket's path has at most 107 bytes, including the names below the base.
_MAX_BASE_LENGTH = 60


class PrivateDirectory:
    """A directory that only this user can access.

    It is locked until this process ends in any way. `make` removes unlocked directories: their
    owners have ended.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls) -> Self:
        base = _base()
        _remove_stale(base)
        unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=base))
        lock = _open(unlocked)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(unlocked.rename(base / unlocked.name.removeprefix(".")), lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def running_directories() -> list[Path]:
    """The directories of this user's stacks whose owners run."""
    return [path for path in sorted(_base().glob(f"{_PREFIX}*")) if _is_in_use(path)]


def _is_in_use(path: Path) -> bool:
    try:
        lock = _open(path)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.fstat(lock).st_uid == os.geteuid()
    finally:
        os.close(lock)
    return False


def _remove_stale(base: Path) -> None:
    """Remove this user's directories whose owners have ended."""
    for path in base.glob(f"{_PREFIX}*"):
        # Another user's, in use, or being removed by another process.
        with contextlib.suppress(OSError):
            _remove_if_unlocked(path)


def _remove_if_unlocked(path: Path) -> None:
    """OSError if another process has locked it, or if it is not a directory."""
    lock = _open(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    """Open a directory without following symbolic links."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _base() -> Path:
    """The folder for temporary files, or /tmp if its path is too long for sockets below it."""
    temporary = tempfile.gettempdir()
    return Path(temporary if len(temporary) <= _MAX_BASE_LENGTH else "/tmp")
