"""A child process that is told what to do, and what becomes of one that fails."""

import sys

import pytest

from benchmarks.engines.host import EngineError, Host

CHILD = """
import os, sys
from benchmarks.engines.answers import answer, job

given = job()
print("printed before it is ready", file=sys.stderr)
if given.get("breaks"):
    raise SystemExit("no such model")

def noisy():
    print("a library's word")
    return given["number"]

def seen():
    return sorted(name for name in os.environ if name.startswith(("QUIRE_", "EXTRA")))

answer({"run": noisy, "die": lambda: os._exit(3), "seen": seen})
"""


@pytest.fixture
def start(tmp_path):
    def begin(**job: object) -> Host:
        command = [sys.executable, "-c", CHILD]
        return Host("child", command, job, tmp_path, {"EXTRA": "1"})

    return begin


def test_it_answers_as_often_as_it_is_asked_and_ends_when_it_is_left(start):
    with start(number=7) as host:
        assert [host.ask("run"), host.ask("run")] == [7, 7]
        assert host.start_s > 0
    with pytest.raises((EngineError, ValueError)):
        host.ask("run")


def test_settings_of_the_caller_do_not_reach_it(start, monkeypatch):
    monkeypatch.setenv("QUIRE_WORKER_BLOCK_SIZE", "99")
    with start() as host:
        assert host.ask("seen") == ["EXTRA"]


def test_one_that_does_not_start_is_told_with_its_log(start):
    with pytest.raises(EngineError, match=r"child has ended; its log ends:(.|\n)*no such model"):
        start(breaks=True)


def test_one_that_dies_is_told(start):
    with start() as host, pytest.raises(EngineError, match="child has ended"):
        host.ask("die")
