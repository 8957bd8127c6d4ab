"""Faults of ranks: which runs have them, which processes they hit, which ends they excuse."""

import os
import subprocess
import sys

import pytest

from benchmarks.chaos.__main__ import main, plan_of
from benchmarks.chaos.experiment import Outcome
from benchmarks.chaos.ranks import followers_of
from benchmarks.chaos.stack import ChaosStack
from benchmarks.chaos.tables import part_of_run
from quire.launcher.child import ChildProcess
from quire.launcher.errors import LaunchError

_FAULTS = {"rank-killed", "rank-stopped", "rank-killed-loading"}
_SHARDS = "--tensor-parallel-size=2"
_STAGES = "--pipeline-parallel-size=2"


@pytest.mark.parametrize(
    ("flags", "sizes", "words"),
    [
        ([_SHARDS], ("2", "1"), "three workers of 2 ranks each, two"),
        ([_STAGES], ("1", "2"), "three workers of 2 stages each, two"),
        ([_SHARDS, _STAGES], ("2", "2"), "three workers of 2 stages of 2 ranks each, two"),
    ],
)
def test_ranks_are_killed_where_there_are_several(
    flags: list[str], sizes: tuple[str, str], words: str
) -> None:
    of_one, of_several = plan_of(()), plan_of(["--engine=demo", *flags])
    names_of_one, names = ({fault.name for fault in one.faults} for one in (of_one, of_several))
    assert names - names_of_one == _FAULTS
    assert names_of_one < names
    settings = of_several.settings
    found = (f"QUIRE_WORKER_{kind}_PARALLEL_SIZE" for kind in ("TENSOR", "PIPELINE"))
    assert tuple(settings[name] for name in found) == sizes
    assert words in part_of_run(of_several, Outcome(baseline=[0.1])).notes[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("rank-killed", "--engine=demo"),
            "rank-killed: needs --tensor-parallel-size or --pipeline-parallel-size",
        ),
        ((_SHARDS,), "simulated workers have no ranks"),
        ((_STAGES,), "simulated workers have no ranks"),
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
