"""Streams that break, leaders that come and go, workers that stop and wake: one lane, one owner."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from sim_tokens import token_at
from worker_driver import LaneClient, Sampling, Sequence, ServedWorker, admit, schedule, served

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from worker_svc.plan.plans import Plan, StepOutput
from worker_svc.runner.step_runner import Callback, no_op
from worker_svc.sim.runner import SimModel, SimRunner
from worker_svc.sim.runner_loading import loaded_runner

_MODEL = SimModel(vocab_size=1000, max_model_len=64, block_size=4, num_blocks=64, max_num_seqs=4)
_PROMPT = [5, 17, 99, 3, 42]
_SEED = 9


class WatchedRunner(SimRunner):
    """Sets an event when the second step reaches the device."""

    def __init__(self) -> None:
        super().__init__(_MODEL)
        self.second = threading.Event()

    def run(self, plan: Plan, before_blocking: Callback = no_op) -> StepOutput:
        if plan.step == 2:
            self.second.set()
        return super().run(plan, before_blocking)


@pytest.fixture
def runner() -> WatchedRunner:
    return WatchedRunner()


@pytest.fixture
async def worker(runner: WatchedRunner) -> AsyncIterator[ServedWorker]:
    async with served(loaded_runner(runner)) as worker:
        yield worker
        runner.gate.set()
    assert runner.kv_checker.violations == []


def prompt_plan(num_computed_tokens: int = 0, tokens: list[int] = _PROMPT) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan()
    admit(
        plan,
        Sequence(0, tokens, len(_PROMPT), num_computed_tokens, [1, 2, 3], Sampling(seed=_SEED)),
    )
    schedule(plan, 0, len(tokens) - num_computed_tokens)
    return plan


def decode_plan() -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan()
    schedule(plan, 0, 1)
    return plan


def token(index: int) -> int:
    """The sequence's output token of an index."""
    return token_at(_SEED, len(_PROMPT) + index, _MODEL.vocab_size)


async def opened(worker: ServedWorker, epoch: int = 1, holder: bytes = b"holder") -> LaneClient:
    lane = LaneClient(worker.stub, epoch=epoch, holder=holder)
    lane.step = (await lane.open()).last_finished_step
    return lane


async def step_on_the_device(worker: ServedWorker, runner: WatchedRunner) -> LaneClient:
    """A lane with step 1 done, 2 held on the device, 3 and 4 queued behind it."""
    lane = await opened(worker)
    await lane.run(prompt_plan())
    runner.gate.clear()
    for _ in range(3):
        await lane.send(decode_plan())
    await asyncio.to_thread(runner.second.wait)
    return lane


async def test_hello_waits_for_the_step_of_a_stream_that_broke(
    worker: ServedWorker, runner: WatchedRunner
) -> None:
    lane = await step_on_the_device(worker, runner)
    lane.call.cancel()
    again = LaneClient(worker.stub)
    opening = asyncio.create_task(again.open())
    # Refused behind it, so it has been heard.
    assert await _fence_of(worker) == 1
    assert not opening.done()
    runner.gate.set()
    # The step on the device has run, those behind it have not.
    assert (await opening).last_finished_step == 2
    # Its KV is kept: all but the last of the tokens it left count as computed.
    again.step = 4
    result = await again.run(prompt_plan(6, [*_PROMPT, token(0), token(1)]))
    assert list(result.sampled_token_ids) == [token(2)]


async def test_a_step_of_the_former_stream_is_not_reported(
    worker: ServedWorker, runner: WatchedRunner
) -> None:
    lane = await step_on_the_device(worker, runner)
    newer = LaneClient(worker.stub, epoch=2)
    opening = asyncio.create_task(newer.open())
    assert await lane.ended() is grpc.StatusCode.ABORTED
    runner.gate.set()
    assert (await opening).last_finished_step == 2
    newer.step = 4
    # Rows were dropped: row 0 is admitted as a free one, with the one token that was delivered.
    result = await newer.run(prompt_plan(5, [*_PROMPT, token(0)]))
    assert (result.epoch, result.step) == (2, 5)
    assert list(result.sampled_token_ids) == [token(1)]


async def test_a_leader_that_wakes_after_the_takeover_is_not_heard(
    worker: ServedWorker, runner: WatchedRunner
) -> None:
    async with wire_to(worker) as (wire, stub):
        old = LaneClient(stub, epoch=1, holder=b"old")
        await old.open()
        await old.run(prompt_plan())
        wire.open.clear()
        new = await opened(worker, epoch=2, holder=b"new")
        # It wakes with a plan in hand, before it has read that its stream is over.
        await old.send(decode_plan())
        wire.open.set()
        assert await old.ended() is grpc.StatusCode.ABORTED
    # Then it opens a stream as the leader that it was.
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await opened(worker, epoch=1, holder=b"old")
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert runner.last_finished_step == 1
    # The new leader's lane has not noticed anything.
    assert (await new.run(prompt_plan())).sampled_token_ids == [token(0)]


async def test_a_plan_of_another_epoch_is_not_run(
    worker: ServedWorker, runner: WatchedRunner
) -> None:
    lane = await opened(worker, epoch=7)
    lane.epoch = 6
    await lane.send(prompt_plan())
    assert await lane.ended() is grpc.StatusCode.FAILED_PRECONDITION
    assert runner.last_finished_step == 0


async def test_a_leader_that_waits_for_the_device_is_passed_by_a_newer_one(
    worker: ServedWorker, runner: WatchedRunner
) -> None:
    lane = await step_on_the_device(worker, runner)
    waiting = LaneClient(worker.stub, epoch=2)
    refused = asyncio.create_task(waiting.open())
    assert await lane.ended() is grpc.StatusCode.ABORTED
    newest = LaneClient(worker.stub, epoch=3)
    opening = asyncio.create_task(newest.open())
    # Refused by the fence that the newest has raised already.
    while await _fence_of(worker) < 3:
        pass
    runner.gate.set()
    assert (await opening).last_finished_step == 2
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await refused
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    newest.step = 4
    assert (await newest.run(prompt_plan())).sampled_token_ids == [token(0)]


async def _fence_of(worker: ServedWorker) -> int:
    """The epoch that the worker names when it refuses an older one."""
    try:
        await LaneClient(worker.stub, epoch=0).open()
    except grpc.aio.AioRpcError as error:
        return int((error.details() or "").split()[-1])
    raise AssertionError("not refused")


class _Wire:
    """A TCP connection's way through this process, which can fall silent without an end."""

    def __init__(self, target: str) -> None:
        self._target = target.rpartition(":")
        self.open = asyncio.Event()
        self.open.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: list[asyncio.Task[None]] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        there, back = await asyncio.open_connection(host, int(port))
        self._writers += [writer, back]
        self._pumps += [
            asyncio.create_task(self._pump(reader, back)),
            asyncio.create_task(self._pump(there, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            await self.open.wait()
            writer.write(data)

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def wire_to(
    worker: ServedWorker,
) -> AsyncIterator[tuple[_Wire, worker_pb2_grpc.WorkerServiceStub]]:
    wire = _Wire(worker.address)
    server = await asyncio.start_server(wire.connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield wire, worker_pb2_grpc.WorkerServiceStub(channel)
    finally:
        server.close()
        await wire.close()


async def test_a_half_open_stream_does_not_hold_the_lane(worker: ServedWorker) -> None:
    async with wire_to(worker) as (wire, stub):
        lane = LaneClient(stub)
        await lane.open()
        await lane.run(prompt_plan())
        wire.open.clear()
        again = await opened(worker)
        assert (await again.run(prompt_plan())).sampled_token_ids == [token(0)]


async def test_a_device_that_does_not_recover_is_reported() -> None:
    class LostRunner(SimRunner):
        def clear(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    lost = asyncio.Event()
    async with served(loaded_runner(LostRunner(_MODEL)), on_device_lost=lost.set) as worker:
        lane = await opened(worker)
        await lane.run(prompt_plan())
        await lane.call.done_writing()
        await asyncio.wait_for(lost.wait(), 10)


@pytest.mark.slow
async def test_a_scheduler_that_fell_silent_is_noticed(worker: ServedWorker) -> None:
    async with wire_to(worker) as (wire, stub):
        lane = LaneClient(stub)
        await lane.open()
        wire.open.clear()
        # Ends with the lane, which only the worker's own pings can end.
        await asyncio.wait_for(worker.servicer.drain(), 60)


async def test_a_stuck_device_is_seen_by_the_step_in_heartbeats(
    worker: ServedWorker, runner: WatchedRunner
) -> None:
    lane = await step_on_the_device(worker, runner)
    assert (await lane.call.read()).heartbeat.last_finished_step == 1
    runner.gate.set()
    for step in (2, 3, 4):
        assert (await lane.result()).step == step
    beat = (await lane.call.read()).heartbeat
    assert beat.last_finished_step == 4


async def test_hello_of_a_draining_worker_has_the_flag(worker: ServedWorker) -> None:
    lane = await opened(worker)
    draining = asyncio.create_task(worker.servicer.drain())
    assert (await lane.call.read()).heartbeat.draining
    # A takeover while it drains: the new leader is notified, and has to close the lane.
    newer = LaneClient(worker.stub, epoch=2)
    assert (await newer.open()).draining
    assert await lane.ended() is grpc.StatusCode.ABORTED
    assert (await newer.run(prompt_plan())).sampled_token_ids == [token(0)]
    assert not draining.done()
    await newer.call.done_writing()
    await draining
