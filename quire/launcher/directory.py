"""A stack's private directory, and what is left of those whose owners were killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

_PREFIX = "quire-stack-"
# Not swept under this name: it is not locked yet.
_UNLOCKED_PREFIX = f".{_PREFIX}"
# Unix socket paths end at 107 bytes; the rest is for the file's name.
_LONGEST_BASE = 60


class PrivateDirectory:
    """A directory that only this user can enter.

    It is locked as long as this process lives, whatever way that ends: a directory without a lock
    has lost its owner, and the next one to be made removes it.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls) -> Self:
        base = _base()
        sweep(base)
        unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=base))
        lock = _open(unlocked)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(unlocked.rename(base / unlocked.name.removeprefix(".")), lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(base: Path) -> None:
    """Removes this user's directories whose owners are no more."""
    for path in base.glob(f"{_PREFIX}*"):
        # Another user's, another sweeper's, or in use.
        with contextlib.suppress(OSError):
            _remove_if_unlocked(path)


def _remove_if_unlocked(path: Path) -> None:
    """OSError if somebody has it, or if it is no directory."""
    lock = _open(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    """Follows no link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _base() -> Path:
    """The usual place, unless that leaves no room for a socket's name."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= _LONGEST_BASE else "/tmp")
