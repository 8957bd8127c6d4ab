"""Workers of one machine, one after the other."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()


@contextmanager
def one_at_a_time(path: str = __file__) -> Iterator[None]:
    """Holds up other processes that come here with the same file, until this one leaves.

    Of workers that size their caches on one GPU at the same time, each would take the other's
    memory for its own. The file is only locked, so any that all of them can read will do.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another worker that sizes its cache")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        # Some network file systems have no locks, which is no reason not to serve.
        log.warning("workers cannot wait for each other", reason=str(error))
