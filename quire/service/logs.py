"""Structured logs: human-readable on a terminal, else JSON lines; without prompts and outputs."""

import logging
import sys
import warnings
from contextlib import suppress
from typing import Literal

import structlog


def configure_logging(
    service: str, level: str = "info", log_format: Literal["auto", "human", "json"] = "auto"
) -> None:
    """Write records of structlog and logging, and Python's warnings, to stderr in one format."""
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
        logger_factory=lambda *_: _Lines(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
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


class _Lines(structlog.WriteLogger):
    """Writes rendered records; a broken pipe is ignored."""

    def msg(self, message: str) -> None:
        with suppress(OSError, ValueError):
            super().msg(message)

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
