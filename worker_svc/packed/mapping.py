"""Maps a file of weights into memory, and moves it into huge pages."""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_HUGE_PAGE: Final = 2**21
# Copied at once, into memory that is then put in the place of the file.
_CHUNK: Final = 8 * _HUGE_PAGE
_PROT_NONE: Final = 0
_ANONYMOUS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED: Final = 0x10
_MREMAP_MAYMOVE_FIXED: Final = 1 | 2
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_READ: Final = 22
_FAILED: Final = ctypes.c_void_p(-1).value


class Mapping:
    """A mapped file, read-only, which lives as long as this object. On Linux."""

    def __init__(self, file: Path) -> None:
        """OSError if it cannot be mapped."""
        self.num_bytes = file.stat().st_size
        self._size = -(-self.num_bytes // _HUGE_PAGE) * _HUGE_PAGE
        self._reserved = _reserve(self._size + _HUGE_PAGE)
        # Only memory whose address is a multiple of a huge page's size can become one.
        self.address = -(-self._reserved // _HUGE_PAGE) * _HUGE_PAGE
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            flags = mmap.MAP_PRIVATE | _MAP_FIXED
            _mmap(self.address, self.num_bytes, mmap.PROT_READ, flags, descriptor)
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _unmap(self._reserved, self._reserved + self._size + _HUGE_PAGE)

    def read_ahead(self) -> None:
        """Read all pages, so that no step waits for one. Releases the interpreter."""
        _LIBC.madvise(
            ctypes.c_void_p(self.address), ctypes.c_size_t(self.num_bytes), _MADV_POPULATE_READ
        )

    def copy_to_huge_pages(self) -> None:
        """Replace the pages of the file by huge ones with a copy, which are read faster. Other
        threads may read meanwhile. Without memory for a copy the rest stays as it is."""
        for begin in range(0, self.num_bytes, _CHUNK):
            size = min(_CHUNK, self._size - begin)
            try:
                self._copy(self.address + begin, size, min(_CHUNK, self.num_bytes - begin))
            except OSError:
                return

    def _copy(self, address: int, size: int, num_bytes: int) -> None:
        reserved = _reserve(size + _HUGE_PAGE)
        reserved_end = reserved + size + _HUGE_PAGE
        copy = -(-reserved // _HUGE_PAGE) * _HUGE_PAGE
        try:
            _mmap(copy, size, mmap.PROT_READ | mmap.PROT_WRITE, _ANONYMOUS | _MAP_FIXED, -1)
            _LIBC.madvise(ctypes.c_void_p(copy), ctypes.c_size_t(size), _MADV_HUGEPAGE)
            ctypes.memmove(copy, address, num_bytes)
            # The kernel replaces the mapping in one step: a reader sees the file or the copy.
            _mremap(copy, size, address)
        except OSError:
            _unmap(reserved, reserved_end)
            raise
        # Not what the copy has left: another thread may have mapped its stack there since.
        _unmap(reserved, copy)
        _unmap(copy + size, reserved_end)


def _reserve(size: int) -> int:
    """Addresses that nothing else gets."""
    return _mmap(None, size, _PROT_NONE, _ANONYMOUS, -1)


def _unmap(begin: int, end: int) -> None:
    if begin < end:
        _LIBC.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin))


def _mmap(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    _LIBC.mmap.restype = ctypes.c_void_p
    found = _LIBC.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(size),
        protection,
        flags,
        descriptor,
        ctypes.c_long(0),
    )
    return _checked(found)


def _mremap(old: int, size: int, new: int) -> int:
    _LIBC.mremap.restype = ctypes.c_void_p
    length = ctypes.c_size_t(size)
    return _checked(
        _LIBC.mremap(
            ctypes.c_void_p(old), length, length, _MREMAP_MAYMOVE_FIXED, ctypes.c_void_p(new)
        )
    )


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address
