"""Versions of files, by which a change is seen."""

import os
from pathlib import Path
from typing import TypeAlias

# Inode, size and time of change: a file that is renamed into place has another inode. None for a
# file that is missing.
FileVersion: TypeAlias = tuple[int, int, int] | None


def file_version(path: Path) -> FileVersion:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
