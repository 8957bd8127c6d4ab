"""Releases the pages of mapped checkpoints, which count as memory of the process."""

import ctypes
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_MADV_DONTNEED: Final = 4
# A mapping's line in /proc/self/smaps: addresses, permissions, offset, device, inode, file.
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)")
_ANONYMOUS: Final = re.compile(r"Anonymous: +(\d+) kB")
_SMAPS: Final = Path("/proc/self/smaps")


class MappedFiles:
    """Files of weights that are converted one after the other."""

    # Reading the list of mappings takes milliseconds.
    _RELEASE_BYTES: Final = 128 * 2**20

    def __init__(self, files: Iterable[Path]) -> None:
        self._names = {str(file.resolve()) for file in files}
        self._num_converted = 0

    def converted(self, num_bytes: int) -> None:
        """Count weights that were read from the files, and release the pages now and then."""
        self._num_converted += num_bytes
        if self._num_converted >= self._RELEASE_BYTES:
            self.release()

    def release(self) -> int:
        """Drop all resident pages of the files, which are read from the page cache if they are
        needed again; return the bytes of the mappings. Does nothing except on Linux."""
        self._num_converted = 0
        num_bytes = 0
        for begin, end in self._unchanged():
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED
            )
            num_bytes += end - begin
        return num_bytes

    def _unchanged(self) -> Iterator[tuple[int, int]]:
        """Addresses of the mappings in which nothing was written: changed pages would be lost."""
        mapping: tuple[int, int] | None = None
        for line in _SMAPS.read_text().splitlines() if _SMAPS.exists() else ():
            if found := _MAPPING.fullmatch(line):
                is_named = found[3] in self._names
                mapping = (int(found[1], 16), int(found[2], 16)) if is_named else None
            elif mapping is not None and (found := _ANONYMOUS.fullmatch(line)):
                if int(found[1]) == 0:
                    yield mapping
                mapping = None
