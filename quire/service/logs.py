"""Structured logs: human-readable on a terminal, else JSON lines; without prompts and outputs.

No service waits long for the reader of its log.
"""

import io
import logging
import os
import select
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import Final, Literal, TextIO

import structlog

# A pipe that has room has room for this many bytes.
_PART_BYTES: Final = select.PIPE_BUF
# Bursts may be faster than the reader. The whole service waits meanwhile, so this long in each
# interval at most, all waits together.
_WAIT_S: Final = 0.5
_WAIT_INTERVAL_S: Final = 10.0


def configure_logging(
    service: str, level: str = "info", log_format: Literal["auto", "human", "json"] = "auto"
) -> None:
    """Write records of structlog and logging, and Python's warnings, to stderr in one format."""
    _open_standard_files()
    output = _Output(sys.stderr)
    human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_service(service),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if human
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Bypasses the standard library, where a line costs twice as much.
        logger_factory=lambda *_: _Lines(output),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    warnings.showwarning = _log_warning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    """Log a Python warning as a record, without its source line."""
    structlog.get_logger().warning(str(message), category=category.__name__)


def _open_standard_files() -> None:
    """Open those of stdin, stdout and stderr that the process was started without, so that no other
    file gets their numbers. They discard what is written."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


class _Output(io.TextIOBase):
    """Writes records to a stream. Those that a pipe or terminal has no room for are left out, and
    their number is logged when it has; one without a reader is ignored."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._file = _descriptor(stream)
        self._encoding = stream.encoding or "utf-8"
        self._poll = select.poll()
        if self._file is not None:
            self._poll.register(self._file, select.POLLOUT)
        self._lock = threading.RLock()
        self._num_lost = 0
        # Whether the last record ends within its line.
        self._is_cut = False
        # The rest of the present interval's time, and when the next one may begin.
        self._wait_s = 0.0
        self._next_interval_at = 0.0

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError), self._lock:
            if self._file is None:
                self._stream.write(text)
                self._stream.flush()
                return len(text)
            self._report_lost()
            self._write(self._file, text.encode(self._encoding, "backslashreplace"))
        return len(text)

    def _write(self, file: int, record: bytes) -> None:
        left = b"\n" + record if self._is_cut else record
        while left:
            if not self._has_room():
                self._num_lost += 1
                self._is_cut = self._is_cut or len(left) < len(record)
                return
            left = left[os.write(file, left[:_PART_BYTES]) :]
        self._is_cut = False

    def _report_lost(self) -> None:
        if self._num_lost and self._poll.poll(0):
            num_lost, self._num_lost = self._num_lost, 0
            message = "log records were left out: they were not read in time"
            structlog.get_logger().error(message, records=num_lost)

    def _has_room(self) -> bool:
        if self._poll.poll(0):
            return True
        now = time.monotonic()
        if now >= self._next_interval_at:
            self._wait_s, self._next_interval_at = _WAIT_S, now + _WAIT_INTERVAL_S
        if self._num_lost or self._wait_s <= 0:
            return False
        has_room = bool(self._poll.poll(self._wait_s * 1000))
        self._wait_s -= time.monotonic() - now
        return has_room


def _descriptor(stream: TextIO) -> int | None:
    """None for a stream in memory."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


class _Lines:
    """Writes rendered records, without a lock: the output has its own, which a thread that holds it
    may take again."""

    def __init__(self, output: _Output) -> None:
        self._output = output

    def msg(self, message: str) -> None:
        self._output.write(f"{message}\n")

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def _add_service(service: str) -> structlog.typing.Processor:
    """Add the service's name to the records of all threads."""

    def add(
        _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return add
