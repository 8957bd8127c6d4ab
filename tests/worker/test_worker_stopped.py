"""Worker processes that are suspended, resumed, stopped, or killed by a request."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest
from sim_tokens import token_at
from worker_driver import LaneClient, Sampling, Sequence, admit, schedule
from worker_processes import sim_process

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from worker_svc.plan.plans import plan_from_proto
from worker_svc.sim import runner
from worker_svc.sim.runner import Poison

_VOCAB_SIZE = 1000
_POISON = 666


def plan_of(*admitted: Sequence) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan()
    for sequence in admitted:
        admit(plan, sequence)
        schedule(plan, sequence.row, len(sequence.tokens) - sequence.num_computed_tokens)
    return plan


def sequence(row: int, tokens: list[int], num_prompt_tokens: int | None = None) -> Sequence:
    blocks = [2 * row + 1, 2 * row + 2]
    return Sequence(row, tokens, num_prompt_tokens or len(tokens), 0, blocks, Sampling(seed=row))


def decode(*rows: int) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan()
    for row in rows:
        schedule(plan, row, 1)
    return plan


@pytest.mark.slow
async def test_a_worker_that_wakes_up_is_the_newest_streams(tmp_path: Path) -> None:
    flags = ("--sim-step-ms=1500", "--sim-token-us=0", "--sim-vocab-size=1000")
    async with sim_process(tmp_path, *flags) as (process, channel):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        old = LaneClient(stub)
        await old.open()
        await old.run(plan_of(sequence(0, [5, 6])))
        for _ in range(6):
            await old.send(decode(0))
        # Some of them are at the worker now, for a heartbeat has come back.
        while not (await old.call.read()).HasField("heartbeat"):
            pass
        process.send_signal(signal.SIGSTOP)
        old.call.cancel()
        new = LaneClient(stub, epoch=2)
        opening = asyncio.create_task(new.open())
        process.send_signal(signal.SIGCONT)
        hello = await opening
        # What was queued has not all been run, and what has been run is said.
        assert 1 <= hello.last_finished_step < 7
        new.step = 7
        result = await new.run(plan_of(sequence(0, [5, 6])))
        assert list(result.sampled_token_ids) == [token_at(0, 2, _VOCAB_SIZE)]
        assert all(beat.last_finished_step < 7 for beat in new.heartbeats)


@pytest.mark.slow
async def test_a_suspended_worker_continues(tmp_path: Path) -> None:
    async with sim_process(tmp_path, "--sim-step-ms=0") as (process, channel):
        lane = LaneClient(worker_pb2_grpc.WorkerServiceStub(channel))
        await lane.open()
        await lane.run(plan_of(sequence(0, [5, 6])))
        process.send_signal(signal.SIGSTOP)
        await lane.send(decode(0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reading := asyncio.create_task(lane.result())), 2)
        process.send_signal(signal.SIGCONT)
        # No other stream was opened, so the lane is unchanged.
        assert (await reading).step == 2


async def test_it_leaves_after_the_grace_though_its_lane_is_open(tmp_path: Path) -> None:
    async with sim_process(tmp_path, "--drain-grace-s=0.2") as (process, channel):
        lane = LaneClient(worker_pb2_grpc.WorkerServiceStub(channel))
        await lane.open()
        process.send_signal(signal.SIGTERM)
        assert await lane.ended() is grpc.StatusCode.UNAVAILABLE
        assert "going away" in await lane.call.details()
        assert await process.wait() == 0


@pytest.mark.slow
async def test_it_leaves_after_the_grace_though_a_step_does_not_end(tmp_path: Path) -> None:
    flags = ("--drain-grace-s=0.2", "--sim-step-ms=600000")
    async with sim_process(tmp_path, *flags) as (process, channel):
        lane = LaneClient(worker_pb2_grpc.WorkerServiceStub(channel))
        await lane.open()
        await lane.send(plan_of(sequence(0, [5, 6])))
        while not (await lane.call.read()).HasField("heartbeat"):
            pass
        process.send_signal(signal.SIGTERM)
        assert await lane.ended() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def test_a_worker_without_a_lane_leaves_at_once(tmp_path: Path) -> None:
    async with sim_process(tmp_path, "--drain-grace-s=600") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_poisoned_prompt_kills_the_process_when_it_runs(tmp_path: Path) -> None:
    flags = ("--sim-step-ms=0", f"--sim-poison-token-id={_POISON}")
    async with sim_process(tmp_path, *flags) as (process, channel):
        lane = LaneClient(worker_pb2_grpc.WorkerServiceStub(channel))
        await lane.open()
        assert len((await lane.run(plan_of(sequence(0, [5, 6])))).sampled_rows) == 1
        await lane.send(plan_of(sequence(1, [5, _POISON, 6])))
        assert await lane.ended() is grpc.StatusCode.UNAVAILABLE
        assert await process.wait() == 137


class _Killed(Exception):
    """In place of the end of this process."""


def test_which_requests_are_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(status: int) -> None:
        raise _Killed

    monkeypatch.setattr(runner.os, "_exit", kill)
    poison = Poison(_POISON)
    # A token of the output is harmless, and so is a prompt that is not scheduled.
    only_admitted = worker_pb2.BatchPlan()
    admit(only_admitted, sequence(1, [_POISON, 5]))
    for message in (plan_of(sequence(0, [5, _POISON], 1)), only_admitted, decode(0)):
        poison.check(plan_from_proto(message))
    with pytest.raises(_Killed):
        poison.check(plan_from_proto(decode(0, 1)))
    released = worker_pb2.BatchPlan(released_rows=[1])
    poison.check(plan_from_proto(released))
    poison.check(plan_from_proto(plan_of(sequence(1, [5]))))
    # Sequences that come back bring their output along; the prompt is what counts.
    poison.check(plan_from_proto(worker_pb2.BatchPlan(released_rows=[1])))
    with pytest.raises(_Killed):
        poison.check(plan_from_proto(plan_of(sequence(1, [_POISON, 7, 8], 1))))
    poison.clear()
    poison.check(plan_from_proto(decode(1)))
