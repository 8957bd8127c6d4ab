"""Files that are read again when they change, and files that others read while they are written."""

import errno
import os
import stat
from pathlib import Path
from typing import TypeAlias

# Inode, size, and the times at which the contents and the inode were changed: a file that is
# renamed into place has another inode, and one that becomes readable, or is copied with its time,
# has the last of these times alone. None for a file that is missing.
FileVersion: TypeAlias = tuple[int, int, int, int] | None


def file_version(path: Path) -> FileVersion:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def check_regular(path: Path) -> None:
    """OSError unless it is a file that can be read at any time: opening a pipe waits for a writer,
    and what was read of one is gone."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))


def replace_contents(path: Path, text: str) -> None:
    """Rename a file into place, so that a reader never finds a part of it. What is no regular file,
    such as /dev/stdout, is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    # A link stays one.
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
