"""Launch errors, and the end of a child process's log that they show."""

import re
from collections.abc import Sequence
from pathlib import Path

_MAX_LINES = 20
# A line's level, in the human-readable format and in JSON.
_LEVEL = re.compile(r'\[(debug|info|warning|error|critical) *\]|"level": "(\w+)"')
_QUIET = {"debug", "info"}


class LaunchError(RuntimeError):
    """A local stack cannot start, or one of its processes has ended. The message has the process,
    how it ended, and the end of its log."""


def log_tail(path: Path) -> str:
    """The last lines of a log, as a continuation of an error message; empty if there are none.

    If there are warnings or errors, lines of lower levels are omitted.
    """
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    levels = [_level(line) for line in lines]
    if any(level and level not in _QUIET for level in levels):
        # A line without a level is part of a traceback, or another program's.
        loud = [line for line, level in zip(lines, levels, strict=True) if level not in _QUIET]
        return _indented("warnings and errors in its log", loud)
    return _indented("the end of its log", lines)


def _indented(heading: str, lines: Sequence[str]) -> str:
    last = "\n".join(f"    {line}" for line in lines[-_MAX_LINES:])
    return f"; {heading}:\n{last}" if last else ""


def _level(line: str) -> str | None:
    match = _LEVEL.search(line)
    return match and (match[1] or match[2])
