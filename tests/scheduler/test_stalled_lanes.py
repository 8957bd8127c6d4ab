"""Lanes that have sequences and run none of them, by a defect of the scheduler."""

import asyncio
from unittest.mock import patch

import pytest
import structlog
from checking_worker import CheckingWorker
from scheduler_stack import check_outputs, num_in_flight, prompt, running_stack
from waiting import until

from scheduler_svc.lane import stall_watch
from scheduler_svc.lane.lane import Lane
from scheduler_svc.lane.pool_client import PoolClient
from scheduler_svc.lane.sequence_table import SequenceTable
from scheduler_svc.store.types import Commit, CommitReply


@pytest.fixture(autouse=True)
def short_stall(monkeypatch):
    monkeypatch.setattr(stall_watch, "STALL_S", 0.3)


async def test_a_lane_that_runs_nothing_is_opened_again(redis_url, sockets):
    worker = CheckingWorker(1, num_stages=2)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        received = gateway.received[await gateway.submit(prompt(9), 40, n=2)]
        await until(lambda: received.choices[1].token_ids, "output of both choices")
        with structlog.testing.capture_logs() as logs:
            # Rows that seem to be in flight are not run.
            with patch.object(SequenceTable, "rows_in_flight", lambda table: frozenset(table.rows)):
                await until(lambda: not stack.engine.lanes, "the loss of the lane")
            await check_outputs(gateway)
        assert received.is_whole
        assert worker.num_streams > 1
        [stalled] = [entry for entry in logs if entry["event"] == "lane stalled"]
        assert stalled["log_level"] == "error"
        assert [row.partition(":")[0] for row in stalled["rows"]] == ["request-1/0", "request-1/1"]
        await worker.check()


async def test_lanes_that_are_empty_or_wait_for_a_worker_stay(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        with patch.object(Lane, "mark_suspects") as lost:
            worker.gate.clear()
            attachment = await gateway.submit(prompt(9), 3)
            await until(lambda: worker.is_held_back, "a step in progress")
            await pause()
            worker.gate.set()
            await gateway.wait_ended(attachment)
            await pause()
            lost.assert_not_called()
        await worker.check()


async def test_steps_end_a_stall(redis_url, sockets):
    """Redis is away for longer than a stall, and the next request arrives in the step that ends the
    one before, so that the lane is never seen empty or with a plan in flight."""
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, multi_step_s=0.05) as stack:
        gateway = await stack.gateway()
        await until(lambda: stack.engine.lanes, "the lane")
        [lane] = stack.engine.lanes.values()
        assigned, commit, assign = asyncio.Event(), PoolClient.commit, Lane.assign
        requests: list[int] = []

        def assign_and_note(lane: Lane, *args: object) -> None:
            assign(lane, *args)
            assigned.set()

        async def slow_commit(pool: PoolClient, step: Commit) -> CommitReply:
            if step.admissions and len(requests) == 1:
                await pause()
            reply = await commit(pool, step)
            if len(requests) == 1 and not step.admissions:
                await until(
                    lambda: num_in_flight(lane) == len(lane._loop._stream._results), "results"
                )
                if lane.is_empty:
                    assigned.clear()
                    requests.append(await submit())
                    await assigned.wait()
            return reply

        async def submit() -> int:
            return await gateway.submit(prompt(9), 1, deferred_delivery=True)

        with (
            patch.object(PoolClient, "commit", slow_commit),
            patch.object(Lane, "assign", assign_and_note),
            patch.object(Lane, "mark_suspects") as lost,
        ):
            requests.append(await submit())
            await until(lambda: len(requests) == 2, "the second request")
            await check_outputs(gateway)
            lost.assert_not_called()
        await worker.check()


async def pause() -> None:
    """Longer than a stall."""
    loop_time = asyncio.get_running_loop().time
    end = loop_time() + 3 * stall_watch.STALL_S
    await until(lambda: loop_time() >= end, "a pause")
