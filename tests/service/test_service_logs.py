"""Log records, and their output after the terminal is closed."""

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog

from quire.service import logs
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


def test_a_pipe_that_is_not_read_leaves_out_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a record that is longer than the rest of the pipe; their number is logged later."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as pipe, open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        configure_logging("gateway", "info", "json")
        for number in range(100):
            logger = structlog.get_logger() if number % 2 else logging.getLogger("library")
            logger.info("x" * 5000)
        records = pipe.read(2**20).splitlines()
        structlog.get_logger().info("read again")
        later = pipe.read(2**20).splitlines()
    complete = [json.loads(line) for line in records[:-1]]
    assert {record["event"] for record in complete} == {"x" * 5000}
    num_cut = 0 if records[-1].endswith(b"}") else 1
    lost, again = (json.loads(line) for line in later if line)
    assert lost["records"] == 100 - len(records) + num_cut
    assert again["event"] == "read again"


def test_a_burst_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a reader that is slower than the service."""
    monkeypatch.setattr(logs, "_WAIT_S", 60.0)
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, ThreadPoolExecutor() as threads:
        lines = threads.submit(pipe.readlines)
        with open(writing, "w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            configure_logging("gateway", "info", "json")
            for number in range(1000):
                structlog.get_logger().info("x" * 2000, number=number)
        assert [json.loads(line).get("number") for line in lines.result()] == list(range(1000))


def test_a_process_without_standard_files_logs_nothing() -> None:
    """Their numbers are those of no other files."""
    program = (
        "import os, structlog, sys; from quire.service.logs import configure_logging;"
        "configure_logging('gateway'); structlog.get_logger().info('started');"
        "sys.stdout.flush(); sys.exit(os.pipe()[0] if os.pipe()[0] < 3 else 0)"
    )
    closed = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
    assert subprocess.run(closed, timeout=60).returncode == 0
