import pytest

from quire.launcher.logs import log_tail

_HUMAN = """\
2026-11-21T09:00:00Z [info     ] listening   address=127.0.0.1:1
2026-11-21T09:00:01Z [error    ] no Redis    why=refused
Traceback (most recent call last):
2026-11-21T09:00:02Z [info     ] sizing      blocks=8
"""
_JSON = """\
{"address": "127.0.0.1:1", "event": "listening", "level": "info"}
{"why": "refused", "event": "no Redis", "level": "warning"}
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "service.log"


def test_what_is_wrong_stands_alone(log):
    log.write_text(_HUMAN)
    assert log_tail(log) == (
        "; its log says:\n"
        "    2026-11-21T09:00:01Z [error    ] no Redis    why=refused\n"
        "    Traceback (most recent call last):"
    )


def test_what_is_wrong_stands_alone_in_json(log):
    log.write_text(_JSON)
    assert log_tail(log) == f"; its log says:\n    {_JSON.splitlines()[1]}"


def test_where_nothing_is_wrong_the_end_is_shown(log):
    log.write_text("".join(f"[info     ] line {i}\n" for i in range(30)))
    shown = log_tail(log).splitlines()
    assert shown[0] == "; its log ends:"
    assert shown[1:] == [f"    [info     ] line {i}" for i in range(10, 30)]


def test_no_log_no_words(log):
    assert log_tail(log) == ""
    log.touch()
    assert log_tail(log) == ""
