"""Shows the progress of a start."""

import shutil
from collections.abc import Callable
from typing import Final, TextIO

_CLEAR: Final = "\r\x1b[2K"


class StartDisplay:
    """On a terminal one line, which each state of the start replaces; elsewhere a line of text per
    action that takes long.

    Give its methods to a `LocalStack`, and call `clear` when the start has ended.
    """

    def __init__(self, out: TextIO, plain: Callable[[str], object], *, has_logs: bool) -> None:
        """`plain` prints a line elsewhere. Logs on the same terminal would garble the one line, so
        `has_logs` selects plain lines as well."""
        self._out = out
        self._plain = plain
        self._is_line = out.isatty() and not has_logs
        self._is_shown = False

    def on_wait(self, actions: str) -> None:
        if not self._is_line:
            self._plain(f"Waiting for {actions} ...")

    def on_progress(self, actions: str) -> None:
        if self._is_line:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"Waiting for {actions}"[:width])
            self._is_shown = True

    def clear(self) -> None:
        if self._is_shown:
            self._write("")
            self._is_shown = False

    def _write(self, text: str) -> None:
        self._out.write(_CLEAR + text)
        self._out.flush()
