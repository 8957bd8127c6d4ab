"""`quire shards`, and the commands that cover all shards, against scripted schedulers."""

import json
from collections.abc import Callable, Iterator

import pytest
from scripted_scheduler import ScriptedScheduler, ScriptedStandby
from typer.testing import CliRunner

from quire.bench.quire_server import QuireServer
from quire.bench.server import RequestFailed
from quire.cli import app
from quire.internal.v1.operations_pb2 import GetStatusResponse, QueueStatus, WorkerStatus


def quire(*arguments: str):
    return CliRunner().invoke(app, arguments)


def reading(number: int, uptime_s: int = 60, num_tokens: int = 0) -> GetStatusResponse:
    """The status of a shard with one worker."""
    status = GetStatusResponse(
        epoch=number,
        uptime_ms=uptime_s * 1000,
        queue=QueueStatus(num_requests=number, num_tokens=100 * number),
        num_accepted=10,
        num_refused=1,
        workers=[
            WorkerStatus(
                incarnation=number << 56,
                address=f"worker-{number}:1",
                num_running=number,
                num_scheduled_tokens=num_tokens,
                num_sampled_tokens=10 * number,
                num_blocks=4,
                num_free_blocks=2,
                block_map=bytes([0, 3, 3, 1, 1]),
            )
        ],
    )
    status.refused_workers.add(address=f"bad-{number}:1", reason="another model")
    return status


@pytest.fixture
def address(tmp_path_factory) -> str:
    return f"unix:{tmp_path_factory.mktemp('s')}/s.sock"


@pytest.fixture
def start() -> Iterator[Callable[..., ScriptedScheduler]]:
    """Start a scripted scheduler."""
    started: list[ScriptedScheduler] = []

    def start(*arguments, **options) -> ScriptedScheduler:
        started.append(ScriptedScheduler(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def two(address: str, start) -> list[ScriptedScheduler]:
    """Two schedulers that lead a shard each."""
    other = f"{address}.other"
    first = (reading(1, 60, 0), reading(1, 61, 5000))
    second = (reading(2, 90, 0), reading(2, 92, 5000))
    return [
        start(address, first, leaders={1: other}, num_shards=2),
        start(other, second, leaders={0: address}, num_shards=2),
    ]


def test_the_shards_are_shown_with_their_leaders(address, start) -> None:
    start(address, leaders={1: "host:1", 2: ""}, num_shards=3)
    result = quire("shards", "--target", address)
    assert result.exit_code == 0
    header, *rows, _, schedulers = result.stdout.splitlines()
    assert header.split() == ["SHARD", "WORKERS", "ASSIGNED", "LIVE", "WAITING", "LEADER"]
    assert [row.split() for row in rows] == [
        ["0", "1", "2", "1,000", "0", address],
        ["1", "1", "2", "1,001", "1", "host:1"],
        ["2", "1", "2", "1,002", "2", "-"],
    ]
    assert schedulers == f"schedulers 2: host:1, {address}"
    result = quire("shards", "--json", "--target", address)
    shown = json.loads(result.stdout)
    assert shown["schedulers"] == ["host:1", address]
    assert shown["shards"][1:] == [
        {
            "shard": shard,
            "leader": leader,
            "workers": [f"worker-{shard}a:1", f"worker-{shard}b:1"],
            "num_workers": 1,
            "num_live": 1000 + shard,
            "num_waiting": shard,
        }
        for shard, leader in ((1, "host:1"), (2, None))
    ]


def test_the_number_is_raised_at_the_leader_of_shard_0(two: list[ScriptedScheduler]) -> None:
    first, second = two
    result = quire("shards", "4", "--target", second.address)
    assert (result.exit_code, result.stdout) == (0, "the number of shards is 4\n")
    assert (first.num_shards, second.num_shards) == (4, 2)
    result = quire("shards", "5", "--json", "--target", first.address)
    assert json.loads(result.stdout) == {"num_shards": 5}


def test_a_lower_number_is_refused_with_the_present_one(two: list[ScriptedScheduler]) -> None:
    for scheduler in two:
        result = quire("shards", "1", "--target", scheduler.address)
        assert result.exit_code == 1
        assert result.stderr == (
            "quire: INVALID_ARGUMENT: num_shards: must be from 2, the present number, to 128"
            " (got 1)\n"
        )


@pytest.mark.parametrize("number", ["0", "two", "1.5"])
def test_a_number_of_shards_is_an_integer_from_1_on(number: str) -> None:
    result = quire("shards", number)
    assert result.exit_code == 2
    assert number in result.stderr


def test_without_a_leader_of_shard_0_the_number_stays(address: str) -> None:
    standby = ScriptedStandby(address, leader="")
    result = quire("shards", "2", "--target", address)
    assert result.exit_code == 1
    assert result.stderr == "quire: UNAVAILABLE: this scheduler does not lead\n"
    standby.stop()


def test_the_status_covers_all_shards(two: list[ScriptedScheduler]) -> None:
    result = quire("status", "--once", "--interval", "0.05", "--target", two[0].address)
    assert result.exit_code == 0
    summary, queue, refused, also_refused, _, header, *rest = result.stdout.splitlines()
    assert summary == "shards 2  workers 2  tokens/s 7,500"
    assert queue == "queue 3 requests, 300 tokens  accepted 20  refused 2"
    assert refused == "worker refused  bad-1:1 (shard 0): another model"
    assert also_refused == "worker refused  bad-2:1 (shard 1): another model"
    rows = [dict(zip(header.split(), row.split(), strict=True)) for row in rest[:2]]
    assert [(row["WORKER"], row["SHARD"], row["RUN"], row["ADDRESS"]) for row in rows] == [
        ("01000000", "0", "1", "worker-1:1"),
        ("02000000", "1", "2", "worker-2:1"),
    ]
    assert sum("# held" in line for line in rest) == 2


def test_the_json_of_several_shards_has_their_sums(two: list[ScriptedScheduler]) -> None:
    result = quire("status", "--once", "--interval", "0.05", "--json", "--target", two[1].address)
    status = json.loads(result.stdout)
    assert status["queue"] == {"num_requests": 3, "num_tokens": 300}
    assert (status["num_accepted"], status["num_refused"]) == (20, 2)
    assert status["tokens_per_s"] == 7500
    assert [(one["shard"], one["epoch"], one["error"]) for one in status["shards"]] == [
        (0, 1, None),
        (1, 2, None),
    ]
    assert [one["shard"] for one in status["workers"]] == [0, 1]
    assert [one["address"] for one in status["refused_workers"]] == ["bad-1:1", "bad-2:1"]


def test_shards_that_cannot_be_asked_are_named(two: list[ScriptedScheduler]) -> None:
    first, second = two
    second.stop()
    result = quire("status", "--once", "--interval", "0.05", "--target", first.address)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "shards 2  workers 1  tokens/s 5,000"
    assert lines[2].startswith("shard 1 not shown  UNAVAILABLE: the scheduler at ")
    assert f"names the leader at {second.address}, which fails" in lines[2]
    result = quire("status", "--once", "--interval", "0.05", "--json", "--target", first.address)
    shard = json.loads(result.stdout)["shards"][1]
    assert (shard["shard"], shard["epoch"]) == (1, None)
    assert second.address in shard["error"]


def test_the_caches_of_all_shards_are_reset(two: list[ScriptedScheduler]) -> None:
    first, second = two
    result = quire("reset-cache", "--target", first.address)
    assert (result.exit_code, result.stdout) == (0, "24 blocks removed from the prefix cache\n")
    second.stop()
    result = quire("reset-cache", "--target", first.address)
    assert (result.exit_code, result.stdout) == (1, "12 blocks removed from the prefix cache\n")
    assert result.stderr.startswith("quire: caches of shard 1 not reset: UNAVAILABLE: ")


def test_without_any_shard_a_command_fails(address: str, start) -> None:
    start(address, leaders={0: "", 1: ""}, num_shards=2)
    for command in (["status", "--once"], ["reset-cache"]):
        result = quire(*command, "--target", address)
        assert result.exit_code == 1
        assert result.stderr == "quire: UNAVAILABLE: this scheduler does not lead\n"


async def test_a_load_test_counts_the_workers_of_all_shards(
    two: list[ScriptedScheduler],
) -> None:
    server = QuireServer("unix:/unused", None, 0, True, scheduler=two[0].address)
    counts = await server.decode_counts()
    assert counts is not None
    assert counts.num_tokens == 30
    two[1].stop()
    with pytest.raises(RequestFailed, match="the scheduler: UNAVAILABLE"):
        await server.decode_counts()
    await server.close()
