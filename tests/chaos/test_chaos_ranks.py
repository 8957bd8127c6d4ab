"""Faults of ranks: which runs have them, which processes they hit, which ends they excuse."""

import os
import subprocess
import sys

import pytest

from benchmarks.chaos.__main__ import main, plan_of
from benchmarks.chaos.ranks import followers_of
from benchmarks.chaos.stack import ChaosStack
from quire.launcher.child import ChildProcess
from quire.launcher.errors import LaunchError

_FAULTS = {"rank-killed", "rank-stopped", "rank-killed-loading"}
_RANKS = ("--engine=demo", "--tensor-parallel-size=2")


def test_ranks_are_killed_where_there_are_several() -> None:
    of_one, of_two = ({fault.name for fault in plan_of(flags).faults} for flags in ((), _RANKS))
    assert of_two - of_one == _FAULTS
    assert of_one < of_two
    settings = plan_of(_RANKS).settings
    assert settings["QUIRE_WORKER_TENSOR_PARALLEL_SIZE"] == "2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rank-killed", "--engine=demo"), "rank-killed: needs --tensor-parallel-size"),
        (("--tensor-parallel-size=2",), "simulated workers have no ranks"),
    ],
)
def test_faults_without_ranks_are_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err


def test_followers_are_found_by_their_parent_and_their_command() -> None:
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen([*command, "worker_svc.ranks"], stdin=subprocess.PIPE) as follower,
        subprocess.Popen([*command, "worker_svc"], stdin=subprocess.PIPE) as other,
    ):
        found = list(followers_of(os.getpid()))
        for process in (follower, other):
            process.communicate(b"\n")
    assert found == [follower.pid]


class NamedProcess(ChildProcess):
    """Is never started."""

    _log_file = None

    def _start(self) -> "subprocess.Popen[bytes]":
        raise NotImplementedError


def test_an_end_is_expected_as_it_is_said_and_once() -> None:
    stack = ChaosStack("model", {})
    note = stack.local.on_end
    assert note is not None
    worker = NamedProcess("worker-0")
    stack.expect_end(worker, "with status 3")
    stack.expect_end(worker)
    ends = [
        LaunchError(f"worker-0 ended {how}")
        for how in ("by SIGKILL", "with status 3", "by SIGKILL")
    ]
    for end in ends:
        note(end)
    assert stack.unexpected_ends == [str(ends[-1])]
