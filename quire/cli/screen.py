"""Prints frames of lines: each replaces the previous one on a terminal, else follows it."""

import shutil
from collections.abc import Sequence
from typing import Final, TextIO

# Width of an output that is not a terminal.
DEFAULT_WIDTH: Final = 100


class Screen:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._num_lines = 0

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns if self._is_terminal else DEFAULT_WIDTH

    def show(self, lines: Sequence[str]) -> None:
        """Print a frame, truncated to the terminal's size."""
        if self._is_terminal:
            self._redraw(lines)
        else:
            self._out.write("".join(f"{line}\n" for line in (*lines, "")))
        self._out.flush()

    def _redraw(self, lines: Sequence[str]) -> None:
        size = shutil.get_terminal_size()
        # The cursor's line remains empty, because a full screen would scroll.
        shown = [line[: size.columns] for line in lines[: size.lines - 1]]
        back = f"\x1b[{self._num_lines}F" if self._num_lines else ""
        self._out.write(f"{back}\x1b[J" + "".join(f"{line}\n" for line in shown))
        self._num_lines = len(shown)
