"""Makes workers of one GPU load one after another."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir

import structlog

log = structlog.get_logger()


def lock_file(folder: Path | None, gpu: str) -> Path:
    """One file per GPU."""
    return (folder or Path(gettempdir())) / f"quire-gpu-{gpu}.lock"


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if needed and never written.

    Workers that load at the same time on one GPU would count each other's memory as their own when
    they size their caches.
    """
    try:
        descriptor = _open(path)
    except OSError as error:
        log.warning("workers of this GPU cannot load one after another", reason=str(error))
        yield
        return
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY)
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    # Workers of other users need the file as well, whatever this process's umask is.
    with suppress(PermissionError):
        os.fchmod(descriptor, 0o666)
    return descriptor


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another worker of this GPU to load")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        # Some network file systems have no locks; the worker serves nevertheless.
        log.warning("workers of this GPU cannot load one after another", reason=str(error))
