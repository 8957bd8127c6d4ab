"""Reports the steps of loading a model: to the log, a terminal, and the launcher in a file."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

import structlog

from quire.service.progress_file import Progress, write_progress
from worker_svc.sizes import size_text

log = structlog.get_logger()

_WRITE_INTERVAL_S: Final = 0.1
_LOG_INTERVAL_S: Final = 3.0
# Of a terminal: to the first column, and everything after it away.
_CLEAR_LINE: Final = "\r\x1b[K"


class LoadProgress:
    """The current step, with the seconds since the first one. Details are written ten times a
    second, and logged every three seconds, at most. Called in several threads by downloads."""

    def __init__(
        self,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        terminal: TextIO | None = None,
    ) -> None:
        """`terminal` gets one line, which is rewritten."""
        self._file = file
        self._clock = clock
        self._terminal = terminal
        self._action = ""
        self._written_s = self._logged_s = 0.0
        self._began_s = clock()

    def begin(self, action: str) -> None:
        self._action = action
        self._written_s = self._logged_s = self._clock()
        self._clear_line()
        log.info("loading", step=action, seconds=self._seconds)
        self._write(Progress(action))

    def count_bytes(self, action: str, done: int, total: int) -> None:
        """Begin a step if it is new, and report how much of it is done."""
        self._count(action, done, f"{size_text(done)} of {size_text(total)}")

    def count_layers(self, action: str, layer: int, num_layers: int, done: int, total: int) -> None:
        """As `count_bytes`, with the layer that is being loaded, from 1."""
        sizes = f"{size_text(done)} of {size_text(total)}"
        self._count(action, done, f"layer {layer} of {num_layers}, {sizes}")

    def end(self) -> None:
        """Remove the terminal's line, and log the seconds of all steps."""
        self._clear_line()
        log.info("loaded", seconds=self._seconds)

    @property
    def _seconds(self) -> float:
        return round(self._clock() - self._began_s, 1)

    def _count(self, action: str, done: int, detail: str) -> None:
        if action != self._action:
            self.begin(action)
        now = self._clock()
        if done and now - self._written_s >= _WRITE_INTERVAL_S:
            self._written_s = now
            self._write(Progress(action, f"{detail}, {self._seconds:.0f} s"))
        if done and now - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now
            self._clear_line()
            log.info("loading", step=action, done=detail, seconds=self._seconds)

    def _write(self, progress: Progress) -> None:
        if self._terminal is not None:
            self._terminal.write(f"{_CLEAR_LINE}{progress}")
            self._terminal.flush()
        if self._file is not None:
            # The start does not depend on its reports.
            with suppress(OSError):
                write_progress(self._file, progress)

    def _clear_line(self) -> None:
        if self._terminal is not None:
            self._terminal.write(_CLEAR_LINE)
            self._terminal.flush()
