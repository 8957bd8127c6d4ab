"""Returns memory to the system, which Python and glibc do too rarely by themselves."""

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Final

# Parameters of mallopt.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
# Larger blocks have pages of their own, which are returned when they are freed. By default the
# threshold rises to 32 MiB as such blocks are freed, and large requests fragment the heap.
_LARGE_BYTES: Final = 128 * 1024
_NUM_ARENAS: Final = 2
_INTERVAL_S: Final = 10.0


def keep_heap_compact() -> bool:
    """Set the allocator's thresholds for this process. False, without effect, unless the C library
    is glibc."""
    library = _glibc()
    if library is None:
        return False
    for parameter, value in (
        (_M_TRIM_THRESHOLD, _LARGE_BYTES),
        (_M_MMAP_THRESHOLD, _LARGE_BYTES),
        (_M_ARENA_MAX, _NUM_ARENAS),
    ):
        library.mallopt(parameter, value)
    return True


async def free_memory_regularly(is_idle: Callable[[], bool]) -> None:
    """Every ten seconds, until cancelled, collect garbage if the process is idle, and return free
    pages if the C library is glibc."""
    library = _glibc()
    # Modules and classes stay: collections need not visit them.
    gc.freeze()
    while True:
        await asyncio.sleep(_INTERVAL_S)
        if is_idle():
            # Errors and their frames refer to each other and to requests of megabytes. Python
            # collects them only after further allocations.
            gc.collect()
        if library is not None:
            # In a thread: it takes milliseconds, without the interpreter's lock.
            await asyncio.to_thread(library.malloc_trim, 0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
