import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from scripted_scheduler import ScriptedScheduler, ScriptedStandby
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.status.status_report import block_map_legend, draw_block_map, report
from quire.internal.v1.operations_pb2 import GetStatusResponse, QueueStatus, WorkerStatus

MS_PER_S, NS_PER_S = 1000, 10**9
NULL, FREE, CACHED, HELD = range(4)


def reading(
    uptime_s: int, num_steps: int, num_tokens: int, busy_s: int = 0, epoch: int = 7
) -> GetStatusResponse:
    worker = WorkerStatus(
        incarnation=0xABCDEF0123456789,
        address="unix:/run/worker.sock",
        num_running=3,
        num_assigned=1,
        num_swapped=2,
        num_steps=num_steps,
        num_scheduled_tokens=num_tokens,
        num_sampled_tokens=num_tokens // 2,
        num_forced_tokens=num_tokens // 40,
        num_draft_tokens=[30, 20],
        num_accepted_tokens=[25, 6],
        num_queried_tokens=100,
        num_hit_tokens=75,
        num_preempted_by_recompute=4,
        num_preempted_by_swap=1,
        busy_ns=busy_s * NS_PER_S,
        idle_ns=(uptime_s - busy_s) * NS_PER_S,
        num_blocks=10,
        num_free_blocks=6,
        num_cached_blocks=2,
        block_map=bytes([NULL, HELD, HELD, HELD, HELD, CACHED, CACHED, FREE, FREE, FREE, FREE]),
    )
    queue = QueueStatus(num_requests=1200, num_tokens=34567)
    return GetStatusResponse(
        epoch=epoch,
        uptime_ms=uptime_s * MS_PER_S,
        queue=queue,
        num_accepted=5,
        num_refused=6,
        workers=[worker],
    )


def quire(*arguments: str):
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def address(tmp_path_factory) -> str:
    return f"unix:{tmp_path_factory.mktemp('s')}/s.sock"


@pytest.fixture
def scheduler(address) -> Iterator[Callable[..., None]]:
    """Start a scripted scheduler at the address."""
    started = []
    yield lambda *readings: started.append(ScriptedScheduler(address, readings))
    for one in started:
        one.stop()


@contextmanager
def watching(address: str, **options) -> Iterator[subprocess.Popen]:
    """Run the command with the shortest interval, and end it by an interrupt."""
    command = [sys.executable, "-m", "quire", "status", "--interval", "0.05", "--target", address]
    process = subprocess.Popen(command, **options)
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_two_statuses_give_rates(address, scheduler):
    scheduler(reading(60, 100, 1000, busy_s=10), reading(62, 150, 41000, busy_s=11))
    result = quire("status", "--once", "--interval", "0.05", "--target", address)
    assert result.exit_code == 0
    up, queue, _, header, row, _, drafts, _, legend, cells = result.stdout.splitlines()
    assert up == "up 0:01:02  epoch 7  workers 1  tokens/s 20,000"
    assert queue == "queue 1,200 requests, 34,567 tokens  accepted 5  refused 6"
    assert dict(zip(header.split(), row.split(), strict=True)) == {
        "WORKER": "abcdef01",
        "RUN": "3",
        "WAIT": "1",
        "SWAP": "2",
        "STEP/S": "25.0",
        "TOK/S": "20,000",
        "OUT/S": "10,000",
        "BUSY": "50%",
        "HITS": "75%",
        "PREEMPTED": "5",
        "FORCED": "5%",
        "DRAFTS": "62%",
        "TOK/ROW": "1.05",
        "HELD": "40%",
        "ADDRESS": "unix:/run/worker.sock",
    }
    assert drafts == "abcdef01  accepted drafts by position: 83% 30%"
    assert legend == "abcdef01  # held 40%  + cached 20%  . free 40%  of 10 blocks"
    assert cells == "####++...."


@pytest.mark.parametrize(
    ("busy_ms", "share"),
    [
        pytest.param(0, "0%", id="idle"),
        pytest.param(950, "95%", id="busy again"),
        pytest.param(30_000, "100%", id="one long step"),
    ],
)
def test_busy_is_a_share_of_the_interval(busy_ms, share):
    """The first step after an idle time reports all of that time."""
    before, now = reading(600, 1, 1), reading(601, 2, 2)
    for status, idle_s, more_ms in ((before, 10, 0), (now, 590, busy_ms)):
        status.workers[0].idle_ns = idle_s * NS_PER_S
        status.workers[0].busy_ns = (10 * MS_PER_S + more_ms) * NS_PER_S // MS_PER_S
    assert report(now, before, width=100)[4].split()[7] == share


def test_a_worker_whose_lane_was_opened_again_has_no_rates():
    """Its counters begin with 0, as after a lost connection."""
    before, now = reading(60, 100, 1000, busy_s=10), reading(62, 3, 40, busy_s=1)
    assert report(now, before, width=100)[4].split()[4:8] == ["-"] * 4


def test_without_a_previous_status_of_the_same_leadership_there_are_no_rates():
    now = reading(1, 150, 300)
    for before in (None, reading(60, 100, 100, epoch=6)):
        lines = report(now, before, width=100)
        assert lines[0].endswith("tokens/s -")
        assert lines[4].split()[4:8] == ["-", "-", "-", "-"]


def test_a_new_draining_worker_has_no_rates_and_no_map():
    before, now = reading(1, 1, 1), reading(2, 2, 2)
    worker = WorkerStatus(incarnation=1, num_blocks=4, num_free_blocks=1, draining=True)
    now.workers.append(worker)
    lines = report(now, before, width=100)
    assert lines[0].endswith("workers 2  tokens/s 1")
    row = lines[5].split()
    assert row[:1] + row[4:9] == ["00000000", "-", "-", "-", "-", "-"]
    assert row[-2:] == ["75%", "(draining)"]
    assert lines[-1] == "####++...."
    assert [line for line in lines if "# held" in line] == lines[-2:-1]


def test_a_refused_worker_is_reported_with_the_reason():
    now = reading(5, 1, 1)
    now.refused_workers.add(address="b:1", reason="another model")
    assert "worker refused  b:1: another model" in report(now, None, width=100)


def test_a_cell_of_a_large_pool_is_several_blocks():
    kinds = bytes([NULL, *[HELD] * 500, *[CACHED] * 300, *[FREE] * 203])
    lines, per_cell = draw_block_map(kinds, width=20, height=5)
    assert per_cell == 11
    assert [len(line) for line in lines] == [20, 20, 20, 20, 12]
    cells = "".join(lines)
    assert cells == "#" * 45 + "+" * 28 + "." * 19
    assert block_map_legend(kinds, per_cell) == (
        "# held 50%  + cached 30%  . free 20%  of 1,003 blocks, 11 to a character"
    )


def test_of_equally_frequent_kinds_a_cell_shows_the_more_used_one():
    pool = bytes([NULL, HELD, FREE, CACHED, FREE])
    assert draw_block_map(pool, width=2, height=1) == (["#+"], 2)


def test_a_pool_without_blocks_has_an_empty_map():
    assert draw_block_map(bytes([NULL]), width=20, height=5) == ([], 1)


def test_status_waits_for_a_scheduler_and_ends_with_an_interrupt(address, scheduler):
    with watching(address, stdout=subprocess.PIPE, text=True) as process:
        assert f"no server responds at {address}" in process.stdout.readline()
        assert process.stdout.readline() == "Trying again ...\n"
        scheduler(reading(60, 100, 1000))
        for line in process.stdout:
            if line.startswith("up "):
                break
        assert line == "up 0:01:00  epoch 7  workers 1  tokens/s -\n"
        assert "\x1b" not in process.stdout.readline()
    process.stdout.close()


def test_on_a_terminal_a_frame_replaces_the_previous_one(address, scheduler):
    scheduler(reading(60, 100, 1000), reading(61, 100, 1000))
    terminal, end = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "LINES": "24"}
    with watching(address, stdout=end, env=environment):
        seen = b""
        while seen.count(b"up 0:01:01") < 2:
            seen += os.read(terminal, 4096)
    os.close(end)
    os.close(terminal)
    first, second, third, *_ = seen.decode().split("\x1b[J")
    # Each frame moves the cursor up by the lines of the previous one.
    assert (first, third.count("\r\n")) == ("", 10)
    assert second.endswith("\x1b[10F")
    assert max(map(len, third.split("\r\n"))) == 60


def test_a_server_that_is_not_a_scheduler_is_reported(server):
    for command in ("status", "reset-cache"):
        result = quire(command, "--target", server.target)
        assert result.exit_code == 1
        assert result.stderr == f"quire: UNIMPLEMENTED: no scheduler at {server.target}\n"


def test_once_fails_without_a_scheduler(address):
    result = quire("status", "--once", "--target", address)
    assert result.exit_code == 1
    assert f"no server responds at {address}" in result.stderr


@pytest.fixture
def standby(address) -> Iterator[ScriptedStandby]:
    """A standby whose leader is at the address."""
    standby = ScriptedStandby(f"{address}.standby", leader=address)
    yield standby
    standby.stop()


def test_the_leader_that_a_standby_names_is_shown(address, standby, scheduler):
    scheduler(reading(60, 100, 1000))
    target = f"{address}.standby"
    result = quire("status", "--once", "--interval", "0.05", "--target", target)
    assert result.exit_code == 0
    assert result.stdout.startswith("up 0:01:00  epoch 7")
    result = quire("reset-cache", "--target", target)
    assert result.stdout == "12 blocks removed from the prefix cache\n"


@pytest.mark.parametrize("command", [["status"], ["status", "--once"], ["reset-cache"]])
def test_a_standby_whose_leader_does_not_respond_ends_the_command(address, standby, command):
    result = quire(*command, "--target", f"{address}.standby")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"quire: UNAVAILABLE: the scheduler at {address}.standby stands by and names the leader "
        f"at {address}, which fails: no server responds"
    )


def test_a_running_status_follows_the_leadership(address, standby, tmp_path):
    leader = ScriptedScheduler(address, [reading(60, 100, 1000)])
    with watching(f"{address}.standby", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("up 0:01:00")
        leader.stop()
        next(line for line in process.stdout if line == "Trying again ...\n")
        standby.leader = f"{address}.next"
        successor = ScriptedScheduler(standby.leader, [reading(80, 100, 1000, epoch=8)])
        next(line for line in process.stdout if line.startswith("up 0:01:20  epoch 8"))
    process.stdout.close()
    successor.stop()


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf"])
def test_an_interval_is_a_number_of_seconds(interval):
    result = quire("status", "--interval", interval)
    assert result.exit_code == 2
    assert "must be a number of seconds" in result.stderr


def test_reset_cache_prints_the_number_of_removed_blocks(address, scheduler):
    scheduler()
    result = quire("reset-cache", "--target", address)
    assert (result.exit_code, result.stdout) == (0, "12 blocks removed from the prefix cache\n")
