"""Memory that the ranks of one host share, for exchanges on the way of a step."""

import mmap
import os
from collections.abc import Callable
from typing import Any, Final

import structlog
import torch

from kernels.cpu.extension import is_compiled
from kernels.dispatch import cpp_implementations
from kernels.exchange import Exchange, ExchangeSizes

log = structlog.get_logger()

# Hidden states of 2,048 tokens of 8,192 numbers, and logits of 256 rows of a vocabulary of 256,000.
# Larger ones are exchanged in other ways. Pages that are never used take no memory.
_SLOT_BYTES: Final = 64 * 2**20
_MATRIX_BYTES: Final = 256 * 2**20
_NAME: Final = "quire-ranks"

# What each rank gives under a name, by rank.
Agree = Callable[[str, Any], list[Any]]


def share_memory(rank: int, size: int, agree: Agree, timeout_s: float) -> Exchange | None:
    """An exchange if all ranks can open the memory of rank 0, because they are on one host. None
    otherwise, for all of them."""
    sizes = ExchangeSizes(size, _SLOT_BYTES, _MATRIX_BYTES)
    descriptor = _create(sizes.num_bytes) if rank == 0 else None
    places = agree("shared memory", [os.getpid(), descriptor, os.urandom(16).hex()])
    owner, number, secret = places[0]
    memory = None if number is None else _open(owner, number, sizes.num_bytes)
    if memory is not None and rank == 0:
        memory[-16:] = bytes.fromhex(secret)
    # The owner has written before anyone compares.
    agree("shared memory written", True)
    is_shared = memory is not None and memory[-16:] == bytes.fromhex(secret)
    # Not compiled here: that takes a minute. A library that is there may not load.
    implementations = cpp_implementations() if is_compiled() else ()
    has_all = all(agree("shared memory opened", is_shared and bool(implementations)))
    if descriptor is not None:
        os.close(descriptor)
    log.info("exchanges between ranks", by="shared memory" if has_all else "gloo")
    if not has_all or memory is None:
        return None
    return Exchange(
        torch.frombuffer(memory, dtype=torch.uint8),
        sizes,
        rank,
        [_process_descriptor(process) for process, _, _ in places],
        timeout_s,
        implementations[-1],
    )


def _create(num_bytes: int) -> int | None:
    """Memory without a name, which is gone with the last process that has it. None if there is no
    such memory, as on macOS, or if this process may not have as much."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = None
    try:
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        log.warning("no memory for exchanges between ranks", reason=str(error))
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _open(owner: int, number: int, num_bytes: int) -> mmap.mmap | None:
    """That of another process, or of this one. None on another host, where this is another file, or
    none."""
    path = f"/proc/{owner}/fd/{number}"
    try:
        if _NAME not in os.readlink(path):
            return None
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _process_descriptor(process: int) -> int:
    """-1 where the system does not report the end of another process."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return -1
