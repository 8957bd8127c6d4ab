"""Workers of one GPU, one after the other."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

log = structlog.get_logger()


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Holds up other processes that come here with the same file, until this one leaves. The file
    is made if it is not there, and only locked.

    Of workers that load at the same time on one GPU, each would take the other's memory for its
    own when it sizes its cache.
    """
    try:
        descriptor = _open(path)
    except OSError as error:
        log.warning("workers of this GPU cannot wait for each other", reason=str(error))
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
    # Other users' workers are to come here, too, whatever this one's mask says.
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
        # Some network file systems have no locks, which is no reason not to serve.
        log.warning("workers of this GPU cannot wait for each other", reason=str(error))
