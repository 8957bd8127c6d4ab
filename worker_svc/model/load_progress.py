"""Reports the steps of loading a model: to the log, and to the launcher in a file."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from quire.service.progress_file import Progress, write_progress
from worker_svc.settings import size_text

log = structlog.get_logger()

_WRITE_INTERVAL_S: Final = 0.1
_LOG_INTERVAL_S: Final = 10.0


class LoadProgress:
    """The current step. Details are written ten times a second, and logged every ten seconds, at
    most. Called in several threads by downloads."""

    def __init__(
        self, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._clock = clock
        self._action = ""
        self._written_s = self._logged_s = 0.0

    def begin(self, action: str) -> None:
        self._action = action
        self._written_s = self._logged_s = self._clock()
        log.info("loading", step=action)
        self._write(Progress(action))

    def count_bytes(self, action: str, done: int, total: int) -> None:
        """Begin a step if it is new, and report how much of it is done."""
        self._count(action, done, f"{size_text(done)} of {size_text(total)}")

    def count(self, action: str, done: int, total: int) -> None:
        self._count(action, done, f"{done} of {total}")

    def _count(self, action: str, done: int, detail: str) -> None:
        if action != self._action:
            self.begin(action)
        now = self._clock()
        if done and now - self._written_s >= _WRITE_INTERVAL_S:
            self._written_s = now
            self._write(Progress(action, detail))
        if done and now - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now
            log.info("loading", step=action, done=detail)

    def _write(self, progress: Progress) -> None:
        if self._file is not None:
            # The start does not depend on its reports.
            with suppress(OSError):
                write_progress(self._file, progress)
