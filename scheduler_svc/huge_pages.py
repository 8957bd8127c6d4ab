"""Asks Linux to keep this process's heap in huge pages.

A step visits the objects of all rows, which lie on thousands of small pages, after the processor
has run other processes. A quarter of its time goes into finding these pages. Python asks for memory
in pieces that are too small for the kernel to use huge pages by itself.
"""

import asyncio
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")
_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE_BYTES: Final = 2 * 2**20
# Of <linux/mman.h>; the second since Linux 6.1. Older kernels collapse pages in the background.
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
# After the start, doubled each time: the heap grows while requests arrive.
_FIRST_S: Final = 1.0
_LONGEST_S: Final = 8.0


async def keep_in_huge_pages() -> None:
    """Repeat `collapse_heap` in a thread, until cancelled."""
    interval_s = _FIRST_S
    while True:
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(collapse_heap)
        interval_s = min(2 * interval_s, _LONGEST_S)


def collapse_heap() -> int:
    """Move the heap to huge pages as far as the kernel can; return the number of bytes that are in
    them now. 0 where there are none, or they are disabled."""
    if not _is_allowed():
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for start, end in _heap():
        libc.madvise(start, end - start, _MADV_HUGEPAGE)
        first, last = -(-start // _PAGE_BYTES) * _PAGE_BYTES, end // _PAGE_BYTES * _PAGE_BYTES
        if first < last and libc.madvise(first, last - first, _MADV_COLLAPSE) == 0:
            num_bytes += last - first
    return num_bytes


def _is_allowed() -> bool:
    try:
        return os.name == "posix" and "[never]" not in _ENABLED.read_text()
    except OSError:
        return False


def _heap() -> Iterator[tuple[int, int]]:
    """The private writable mappings without a file, stacks of threads included."""
    for line in _MAPS.read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end
