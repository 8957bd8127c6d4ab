"""What a child process said last."""

import re
from collections.abc import Sequence
from pathlib import Path

_MOST_LINES = 20
# A line's level, for people and in JSON.
_LEVEL = re.compile(r'\[(debug|info|warning|error|critical) *\]|"level": "(\w+)"')
_QUIET = {"debug", "info"}


def log_tail(path: Path) -> str:
    """The log's last lines, to follow the words of an error; empty if there are none.

    Where some are warnings or worse, the lines of lower levels are left out.
    """
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    levels = [_level(line) for line in lines]
    if any(level and level not in _QUIET for level in levels):
        # A line without a level is part of a traceback, or another program's.
        loud = [line for line, level in zip(lines, levels, strict=True) if level not in _QUIET]
        return _shown("its log says", loud)
    return _shown("its log ends", lines)


def _shown(what: str, lines: Sequence[str]) -> str:
    last = "\n".join(f"    {line}" for line in lines[-_MOST_LINES:])
    return f"; {what}:\n{last}" if last else ""


def _level(line: str) -> str | None:
    match = _LEVEL.search(line)
    return match and (match[1] or match[2])
