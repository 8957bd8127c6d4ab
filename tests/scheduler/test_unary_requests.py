"""Unary requests, whose clients read no tokens before their end, through the whole scheduler."""

import asyncio
import time

import pytest
from checking_worker import CheckingWorker, rounds_of
from scheduler_stack import (
    ABORTED,
    CANCELLED,
    INTERNAL,
    Gateway,
    Received,
    Stack,
    info_of,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import scheduler_pb2, worker_pb2
from scheduler_svc.core.request import DEFERRED_TOKENS
from scheduler_svc.lane import batch_window, multi_step

LONG = 100


def roomy(incarnation: int = 1) -> CheckingWorker:
    return CheckingWorker(incarnation, num_blocks=1024, max_model_len=256)


async def begun(stack: Stack, gateway: Gateway, **overrides: object) -> list[Received]:
    """Several requests that have their first tokens."""
    attachments = [
        await gateway.submit(
            prompt(9, tag),
            **{
                "max_tokens": LONG,
                "seed": tag,
                "num_logprobs": tag,
                "deferred_delivery": True,
                **overrides,
            },
        )
        for tag in range(3)
    ]
    received = [gateway.received[attachment] for attachment in attachments]
    await until(lambda: all(min(one.next_indices) for one in received), "their first tokens")
    return received


async def test_tokens_are_sent_in_few_frames(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": roomy()}) as stack:
        gateway = await stack.gateway()
        for tag in range(8):
            await gateway.submit(prompt(9, tag), max_tokens=LONG, seed=tag, deferred_delivery=True)
        assert all(received.is_whole for received in await gateway.wait_ended())
        # Each first token, each end, and the buffered tokens in between.
        assert gateway.num_token_frames <= 8 + 8 + LONG // DEFERRED_TOKENS + 1


async def test_ends_by_stop_tokens_and_several_choices_are_whole(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": roomy()}) as stack:
        gateway = await stack.gateway()
        probe = gateway.received[await gateway.submit(prompt(6), max_tokens=60, seed=5)]
        await gateway.wait_ended()
        stop = probe.token_ids[44]
        await gateway.submit(
            prompt(6), max_tokens=60, seed=5, deferred_delivery=True, stop_token_ids=(stop,)
        )
        await gateway.submit(
            prompt(7), max_tokens=60, seed=6, deferred_delivery=True, n=3, num_logprobs=2
        )
        assert all(received.is_whole for received in await gateway.wait_ended())


def num_rows_of_first_plan(worker: CheckingWorker) -> int:
    return next(len(plan.schedule.rows) for plan in worker.plans if plan.schedule.rows)


async def test_a_batch_window_ends_when_a_streamed_request_arrives(redis_url, sockets, monkeypatch):
    monkeypatch.setattr(batch_window, "_MIN_GAP_S", 60)
    monkeypatch.setattr(batch_window, "_MAX_WINDOW_S", 60)
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for tag in range(3):
            await gateway.submit(prompt(9, tag), max_tokens=4, seed=tag, deferred_delivery=True)
        await gateway.submit(prompt(9, 3), max_tokens=4, seed=3)
        assert all(received.is_whole for received in await gateway.wait_ended())
        assert num_rows_of_first_plan(worker) == 4


async def test_a_batch_window_ends_when_no_more_requests_arrive(redis_url, sockets, monkeypatch):
    monkeypatch.setattr(batch_window, "_MIN_GAP_S", 0.05)
    monkeypatch.setattr(batch_window, "_MAX_WINDOW_S", 60)
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(9), max_tokens=4, seed=1, deferred_delivery=True)
        assert all(received.is_whole for received in await gateway.wait_ended())


async def test_a_request_cancelled_within_the_batch_window_is_not_computed(
    redis_url, sockets, monkeypatch
):
    monkeypatch.setattr(batch_window, "_MIN_GAP_S", 60)
    monkeypatch.setattr(batch_window, "_MAX_WINDOW_S", 60)
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        cancelled = await gateway.submit(prompt(9), max_tokens=4, seed=1, deferred_delivery=True)
        await until(lambda: stack.engine.lanes and stack.only_lane.assigned, "its place")
        await gateway.cancel(cancelled)
        await gateway.wait_ended(cancelled)
        await gateway.submit(prompt(9, 1), max_tokens=4, seed=2)
        await gateway.wait_ended()
        assert worker.num_sampled_tokens == 4


async def test_a_full_lane_has_no_batch_window(redis_url, sockets, monkeypatch):
    monkeypatch.setattr(batch_window, "_MIN_GAP_S", 60)
    monkeypatch.setattr(batch_window, "_MAX_WINDOW_S", 60)
    worker = roomy()
    worker.gate.clear()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for tag in range(8):
            await gateway.submit(prompt(9, tag), max_tokens=4, seed=tag, deferred_delivery=True)
        # They fill two steps, and arrive before the first one completes.
        await until(lambda: len(stack.engine.live) == 8, "all of them")
        worker.gate.set()
        assert all(received.is_whole for received in await gateway.wait_ended())


async def test_a_request_cancelled_in_the_batch_window_is_released_at_once(
    redis_url, sockets, monkeypatch
):
    """The first plan is in flight, and the second one is delayed."""
    monkeypatch.setattr(batch_window, "_MIN_GAP_S", 60)
    monkeypatch.setattr(batch_window, "_MAX_WINDOW_S", 0.01)
    worker = roomy()
    worker.gate.clear()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        cancelled = await gateway.submit(prompt(9), max_tokens=LONG, seed=1, deferred_delivery=True)
        await until(lambda: worker.plans, "the first plan")
        await gateway.cancel(cancelled)
        await gateway.wait_ended(cancelled)
        worker.gate.set()


async def test_a_draining_worker_requeues_assigned_requests(redis_url, sockets, monkeypatch):
    monkeypatch.setattr(batch_window, "_MIN_GAP_S", 60)
    monkeypatch.setattr(batch_window, "_MAX_WINDOW_S", 60)
    workers = {1: roomy(1), 2: roomy(2)}
    async with running_stack(redis_url, sockets, {"a": workers[1], "b": workers[2]}) as stack:
        gateway = await stack.gateway()
        lanes = stack.engine.lanes
        await until(lambda: len(lanes) == 2, "both lanes")
        waiting = await gateway.submit(prompt(9), max_tokens=4, seed=1, deferred_delivery=True)
        await until(lambda: any(lane.assigned for lane in lanes.values()), "its place")
        [place] = [key for key, lane in lanes.items() if lane.assigned]
        workers[place].drain()
        [other] = workers.keys() - {place}
        await until(lambda: lanes[other].assigned, "another place")
        await gateway.submit(prompt(9, 1), max_tokens=4, seed=2)
        await gateway.wait_ended(waiting)


async def test_plans_have_several_tokens_and_sequences_end_where_they_should(
    redis_url, sockets, any_arrival_rate
):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for tag in range(8):
            await gateway.submit(
                prompt(9, tag),
                max_tokens=30 + tag,
                seed=tag,
                num_logprobs=tag % 3,
                deferred_delivery=True,
            )
        assert all(received.is_whole for received in await gateway.wait_ended())
        assert max(rounds_of(worker)) == multi_step.MAX_ROUNDS
        assert len(worker.plans) < 30
        # Nothing is computed after a last token.
        assert worker.num_sampled_tokens == sum(30 + tag for tag in range(8))
        await worker.check()


async def test_beside_a_stream_each_plan_has_one_token_of_each_sequence(
    redis_url, sockets, any_arrival_rate
):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(8), max_tokens=LONG, seed=1)
        await gateway.submit(prompt(9), max_tokens=LONG, seed=2, deferred_delivery=True)
        assert all(received.is_whole for received in await gateway.wait_ended())
        schedules = [plan.schedule for plan in worker.plans if plan.schedule.rows]
        stream_row = schedules[0].rows[0]
        # Behind the stream's end the other request runs alone.
        beside = [schedule for schedule in schedules if stream_row in schedule.rows]
        assert any(len(schedule.rows) == 2 for schedule in beside)
        assert {max(schedule.num_rounds, default=1) for schedule in beside} == {1}


async def test_plans_are_short_soon_after_an_arrival(redis_url, sockets):
    """Each plan is at most a tenth as long as the time since the last arrival, or has one round."""
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        arrived_at, found = 0.0, []

        def record(result: worker_pb2.StepResult) -> None:
            result.times.preparing_ns = result.times.sampling_ns = 0
            num_rounds = max(worker.plans[-1].schedule.num_rounds, default=1)
            result.times.forward_ns = num_rounds * 10**6
            found.append((time.monotonic() - arrived_at, num_rounds))

        worker.distort = record
        for tag in range(2):
            await asyncio.sleep(0.2)
            arrived_at = time.monotonic()
            await gateway.submit(prompt(9, tag), max_tokens=LONG, seed=tag, deferred_delivery=True)
            assert all(received.is_whole for received in await gateway.wait_ended())
        assert found
        assert all(count == 1 or 0.001 * count <= 0.1 * elapsed for elapsed, count in found)


async def test_while_a_sequence_waits_for_a_row_plans_have_one_round(
    redis_url, sockets, any_arrival_rate
):
    worker = CheckingWorker(1, num_blocks=1024, max_model_len=256, max_num_seqs=1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        for tag in range(2):
            await gateway.submit(prompt(9, tag), max_tokens=LONG, seed=tag, deferred_delivery=True)
        await until(lambda: len(stack.engine.waiting) == 1, "the other one in the queue")
        worker.gate.set()
        assert all(received.is_whole for received in await gateway.wait_ended())
        rounds = rounds_of(worker)
        assert set(rounds[:LONG]) == {1}
        assert max(rounds[LONG:]) == multi_step.MAX_ROUNDS


async def test_plans_without_rows_do_not_change_the_number_of_rounds(
    redis_url, sockets, any_arrival_rate
):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()

        def slow(result: worker_pb2.StepResult) -> None:
            result.times.forward_ns = 10**9 if worker.plans[-1].schedule.rows else 0

        worker.distort = slow
        for tag in range(3):
            await gateway.submit(prompt(9, tag), max_tokens=9, seed=tag, deferred_delivery=True)
            await gateway.wait_ended()
            # The release of its row.
            await worker.check()
        assert set(rounds_of(worker)) == {1}


async def test_few_tokens_are_computed_after_a_stop_token(redis_url, sockets, any_arrival_rate):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        probe = gateway.received[await gateway.submit(prompt(6), max_tokens=60, seed=5)]
        await gateway.wait_ended()
        num_sampled, num_plans = worker.num_sampled_tokens, len(worker.plans)
        stop = probe.token_ids[44]
        length = probe.token_ids.index(stop) + 1
        original = await gateway.submit(
            prompt(6), max_tokens=60, seed=5, deferred_delivery=True, stop_token_ids=(stop,)
        )
        await gateway.wait_ended()
        assert gateway.received[original].token_ids == probe.token_ids[:length]
        most = multi_step.MAX_ROUNDS_BEFORE_STOP
        assert max(rounds_of(worker)[num_plans - len(worker.plans) :]) == most
        # The rest of its plan, and the one sent ahead.
        assert worker.num_sampled_tokens - num_sampled - length <= most - 1 + most
        await worker.check()


async def test_a_row_that_fails_in_a_later_round_fails_alone(redis_url, sockets, any_arrival_rate):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        received = await begun(stack, gateway, num_logprobs=2)

        def fail_second_round(result: worker_pb2.StepResult) -> None:
            rows = list(result.sampled_rows)
            if rows.count(1) < 2:
                return
            worker.distort = lambda result: None
            last = len(rows) - 1 - rows[::-1].index(1)
            del result.sampled_rows[last], result.sampled_token_ids[last]
            _without(result.logprobs, last)
            result.failures.add(row=1, reason="no number")

        worker.distort = fail_second_round
        await gateway.wait_ended()
        codes = [None if one.failure is None else one.failure.code for one in received]
        assert codes == [None, INTERNAL, None]
        assert received[0].is_whole
        assert received[2].is_whole


def _without(logprobs: worker_pb2.Logprobs, at: int) -> None:
    start = sum(logprobs.num_entries[:at])
    end = start + logprobs.num_entries[at]
    del logprobs.num_entries[at]
    for field in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks):
        del field[start:end]


async def test_a_lost_worker_loses_no_tokens(redis_url, sockets):
    async with running_stack(
        redis_url, sockets, {"a": roomy()}, names=("a", "b"), drain_grace_s=5
    ) as stack:
        gateway = await stack.gateway()
        received = await begun(stack, gateway)
        await stack.stop_worker("a")
        await stack.start_worker("b", roomy(2))
        await gateway.wait_ended()
        assert all(one.is_whole for one in received)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "drained"])
async def test_a_new_leader_delivers_what_the_last_one_had_buffered(redis_url, sockets, is_killed):
    async with running_stack(redis_url, sockets, {"a": roomy()}) as stack:
        received = await begun(stack, await stack.gateway())
        leader, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.is_standby, "a standby")
        if is_killed:
            await leader.kill()
            stack.expire_lease(leader)
        else:
            await leader.drain()
        gateway = await stack.gateway()
        for one in received:
            await gateway.submit_again(one)
        assert all(again.is_whole for again in await gateway.wait_ended())


async def test_a_request_taken_over_by_a_stream_is_streamed(redis_url, sockets):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        [original, *_] = await begun(stack, first, max_tokens=200)
        worker.gate.clear()
        attachment = await other.attach(original, 1)
        await until(lambda: original.failure is not None, "the first stream's end")
        assert (original.failure.code, info_of(original.failure).reason) == (ABORTED, "TAKEN_OVER")
        frames = other.num_token_frames
        worker.gate.set()
        [received] = await other.wait_ended(attachment)
        assert received.is_whole
        # One per step, except for earlier tokens; some steps are delivered together.
        assert other.num_token_frames - frames > LONG // DEFERRED_TOKENS + 2


async def test_a_cancelled_request_is_notified(redis_url, sockets):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        [received, *_] = await begun(stack, gateway, max_tokens=240)
        worker.gate.clear()
        [group] = [
            group
            for group in stack.engine.live.values()
            if group.key.request_id == received.submission.request_id
        ]
        key = scheduler_pb2.RequestKey(request_id=received.submission.request_id)
        await gateway.send(cancellations=[scheduler_pb2.Cancellation(request=key)])
        await until(lambda: group.error is not None, "the cancellation")
        worker.gate.set()
        await until(lambda: received.failure is not None, "the end")
        assert received.failure.code == CANCELLED
        await gateway.wait_ended()
