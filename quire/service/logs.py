"""Logs: structured, human on a terminal, JSON lines otherwise. Prompts and outputs never go in."""

import logging
import sys
import warnings
from contextlib import suppress
from typing import Literal

import structlog


def configure_logging(
    service: str, level: str = "info", log_format: Literal["auto", "human", "json"] = "auto"
) -> None:
    """Sends structlog's and the standard library's records, and warnings, to stderr in one form."""
    human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _names(service),
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
        # Not by way of the standard library: there a line for each request costs twice as much.
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
    """Python's warnings are records like all others; without the line that warns."""
    structlog.get_logger().warning(str(message), category=category.__name__)


class _Lines(structlog.WriteLogger):
    """Writes rendered records. A stream that nobody reads any more stops nobody's work."""

    def msg(self, message: str) -> None:
        with suppress(OSError, ValueError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def _names(service: str) -> structlog.typing.Processor:
    """Adds the service's name to every record, whatever thread it comes from."""

    def add(
        _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return add
