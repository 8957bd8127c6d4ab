import pytest

from quire.launcher.errors import log_tail

_HUMAN = """\
2026-11-21T09:00:00Z [info     ] listening   address=127.0.0.1:1
2026-11-21T09:00:01Z [error    ] Redis unavailable reason=refused
Traceback (most recent call last):
2026-11-21T09:00:02Z [info     ] sizing      blocks=8
"""
_JSON = """\
{"address": "127.0.0.1:1", "event": "listening", "level": "info"}
{"reason": "refused", "event": "Redis unavailable", "level": "warning"}
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "service.log"


def test_warnings_and_errors_are_shown_without_other_lines(log):
    log.write_text(_HUMAN)
    assert log_tail(log) == (
        "; warnings and errors in its log:\n"
        "    2026-11-21T09:00:01Z [error    ] Redis unavailable reason=refused\n"
        "    Traceback (most recent call last):"
    )


def test_warnings_in_json_are_shown_without_other_lines(log):
    log.write_text(_JSON)
    assert log_tail(log) == f"; warnings and errors in its log:\n    {_JSON.splitlines()[1]}"


def test_without_warnings_the_end_is_shown(log):
    log.write_text("".join(f"[info     ] line {i}\n" for i in range(30)))
    shown = log_tail(log).splitlines()
    assert shown[0] == "; the end of its log:"
    assert shown[1:] == [f"    [info     ] line {i}" for i in range(10, 30)]


def test_an_absent_or_empty_log_has_no_tail(log):
    assert log_tail(log) == ""
    log.touch()
    assert log_tail(log) == ""
