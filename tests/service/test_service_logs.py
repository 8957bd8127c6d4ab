"""Log records, and their output after the terminal is closed."""

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest
import structlog

from quire.service.logs import configure_logging


class ClosedTerminal(io.StringIO):
    """A closed terminal."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the logging of other tests."""
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level, showwarning = root.handlers, root.level, warnings.showwarning
    yield
    warnings.showwarning = showwarning
    root.handlers = handlers
    root.setLevel(level)
    structlog.configure(**before)


def test_records_of_both_libraries_have_one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    configure_logging("gateway", "info", "json")
    structlog.get_logger().info("request ended", total_s=0.5)
    structlog.get_logger().debug("below the level")
    logging.getLogger("library").warning("odd %s", "thing")
    ours, theirs = map(json.loads, sys.stderr.getvalue().splitlines())  # type: ignore[attr-defined]
    assert (ours["event"], ours["level"], ours["total_s"]) == ("request ended", "info", 0.5)
    assert (theirs["event"], theirs["level"]) == ("odd thing", "warning")
    assert ours["service"] == theirs["service"] == "gateway"
    assert ours["timestamp"].endswith("Z")


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    configure_logging("worker", "info", "json")
    for _ in range(2):
        warnings.warn("no C++ kernels", stacklevel=1)
    [line] = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    record = json.loads(line)
    assert (record["event"], record["level"]) == ("no C++ kernels", "warning")
    assert (record["service"], record["category"]) == ("worker", "UserWarning")


def test_an_exception_is_logged_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    configure_logging("gateway", "info", "json")
    try:
        raise ValueError("no such thing")
    except ValueError:
        structlog.get_logger().exception("a call failed")
    [line] = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "ValueError: no such thing" in json.loads(line)["exception"]


def test_a_closed_terminal_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    configure_logging("gateway", "info", "human")
    structlog.get_logger().info("request ended")
    structlog.get_logger().error("and more")
