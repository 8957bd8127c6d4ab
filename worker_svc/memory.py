"""How this process gets its memory, and what it keeps."""

import ctypes
import os
from pathlib import Path

# glibc's names for what `mallopt` sets (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 2**30
# The most that older versions of glibc take.
_LARGEST_THRESHOLD = 2**25


def prepare_memory() -> None:
    """To be called before torch is there and threads are.

    torch then asks Linux for pages of 2 MiB where a tensor has as much: weights and the cache are
    read from end to end in every step, and the addresses of small pages do not fit the processor's
    table of them. The environment's own word goes before. All threads share one arena, because
    those of other threads give back what they can, whatever `keep_freed_memory` says.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if glibc := _glibc():
        glibc.mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """To be called when the model is loaded: what that took and needs no more is given back, and
    from here on what is freed stays with the process. Steps ask for the same sizes again and
    again, and memory that is new costs a page fault for every page.

    Does nothing where the C library is not glibc.
    """
    if glibc := _glibc():
        glibc.malloc_trim(0)
        glibc.mallopt(_M_TRIM_THRESHOLD, _LARGE)
        if not glibc.mallopt(_M_MMAP_THRESHOLD, _LARGE):
            glibc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)


def host_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this machine has, or that its container may take if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
