"""How this process gets its memory: set before torch is there, for all of the process's life."""

import ctypes
import os

# glibc's names for what `mallopt` sets (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 2**30
# The most that older versions of glibc take.
_LARGEST_THRESHOLD = 2**25


def keep_freed_memory() -> None:
    """Steps ask for the same sizes again and again: what one frees stays with the process, for
    memory that is new costs a page fault for every 4 KiB. One arena, because the arenas of other
    threads give back what they can. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, _LARGE)
    if not mallopt(_M_MMAP_THRESHOLD, _LARGE):
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)


def ask_for_huge_pages() -> None:
    """torch then asks Linux for pages of 2 MiB where a tensor has as much: weights and the cache
    are read from end to end in every step, and small pages' addresses do not fit the processor's
    table of them. The environment's own word goes before."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
