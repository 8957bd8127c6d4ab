"""The files of a cache: found by a key, written atomically, evicted when they exceed a limit."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from worker_svc.packed.tensor_file import TensorFileWriter
from worker_svc.sizes import size_text

log = structlog.get_logger()

_SUFFIX: Final = ".packed"
_PARTIAL: Final = ".partial"
# Left free on the file system.
_SPARE_BYTES: Final = 2**30


class CacheFolder:
    """Files of one folder, which several processes may use at once."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def touch(self, key: str) -> None:
        """Count a file as the one used last, where that may be written."""
        with suppress(OSError):
            os.utime(self.path(key))

    def remove(self, key: str) -> None:
        with suppress(OSError):
            self.path(key).unlink(missing_ok=True)

    def write(self, key: str, content: TensorFileWriter) -> bool:
        """Write a file unless another process does; evict others, those used longest ago first.
        False, with a line in the log, if it cannot be written."""
        try:
            if self.path(key).exists():
                return False
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._partial(key) as file:
                if file is None:
                    log.info("another process writes the packed weights", key=key)
                    return False
                # After that: files would be evicted for what another process has written already.
                if not self._make_room(content.num_bytes):
                    return False
                content.write(file)
                file.flush()
                # Else a crash of the machine could leave a file of the right size without data.
                os.fsync(file.fileno())
                os.replace(file.name, self.path(key))
        except OSError as error:
            self._log_refusal(reason=str(error))
            return False
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Evict files until `num_bytes` fit; False, with a line in the log, if they do not."""
        if num_bytes > self._max_bytes:
            limit = size_text(self._max_bytes)
            self._log_refusal(bytes=size_text(num_bytes), reason=f"more than the limit of {limit}")
            return False
        self._remove_abandoned()
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
        total = sum(found.st_size for _, found in files)
        if not self._fits_disk(num_bytes, total):
            return False
        for path, found in files:
            free = shutil.disk_usage(self._folder).free
            if total + num_bytes <= self._max_bytes and num_bytes + _SPARE_BYTES <= free:
                break
            path.unlink(missing_ok=True)
            total -= found.st_size
            log.info("packed weights evicted", file=path.name, bytes=size_text(found.st_size))
            # The disk keeps what processes have mapped: the other files may be mapped as well.
            gained = shutil.disk_usage(self._folder).free - free
            if total + num_bytes <= self._max_bytes and gained < found.st_size // 2:
                break
        return self._fits_disk(num_bytes, 0)

    def _fits_disk(self, num_bytes: int, num_evictable: int) -> bool:
        """Whether the disk has room once so many bytes are evicted; a line in the log if not."""
        room = shutil.disk_usage(self._folder).free + num_evictable
        if num_bytes + _SPARE_BYTES > room:
            reason = f"the disk has room for {size_text(room)}, other packed weights included"
            self._log_refusal(bytes=size_text(num_bytes), reason=reason)
            return False
        return True

    def _log_refusal(self, **reason: str) -> None:
        log.warning("packed weights are not cached", folder=str(self._folder), **reason)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                yield path, path.stat()

    def _remove_abandoned(self) -> None:
        """Remove what processes left behind that ended while they wrote."""
        for path in self._folder.glob(f"*{_PARTIAL}"):
            with suppress(OSError), path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, path):
                    path.unlink()

    @contextmanager
    def _partial(self, key: str) -> Iterator[BinaryIO | None]:
        """A file to write, locked while it is open; None if another process has it. It is removed
        unless it gets another name."""
        path = self._folder / f"{key}{_PARTIAL}"
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            if not _is_at(file, path):
                # Another process has completed it in the meantime.
                yield None
                return
            try:
                # Not for appending, and without what an ended process has written.
                with path.open("wb") as opened:
                    yield opened
            finally:
                if _is_at(file, path):
                    path.unlink()


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is the one of this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
