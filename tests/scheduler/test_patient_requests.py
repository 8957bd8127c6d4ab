"""Requests whose tokens nobody sees before their end, through the whole scheduler."""

import asyncio
import time

import pytest
from ledger_worker import LedgerWorker
from scheduler_stack import (
    ABORTED,
    CANCELLED,
    INTERNAL,
    Gateway,
    Heard,
    Stack,
    info_of,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import scheduler_pb2, worker_pb2
from scheduler_svc.gateways.gathering import PATIENT_TOKENS
from scheduler_svc.lanes import company, multi_step

LONG = 100


def roomy(incarnation: int = 1) -> LedgerWorker:
    return LedgerWorker(incarnation, num_blocks=1024, max_model_len=256)


async def begun(stack: Stack, gateway: Gateway, **asked: object) -> list[Heard]:
    """Several that have their first tokens."""
    attachments = [
        await gateway.submit(
            prompt(9, tag),
            **{"max_tokens": LONG, "seed": tag, "num_logprobs": tag, "patient": True, **asked},
        )
        for tag in range(3)
    ]
    heard = [gateway.heard[attachment] for attachment in attachments]
    await until(lambda: all(min(one.next_indices) for one in heard), "their first tokens")
    return heard


async def test_their_tokens_come_in_few_frames(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": roomy()}) as stack:
        gateway = await stack.gateway()
        for tag in range(8):
            await gateway.submit(prompt(9, tag), max_tokens=LONG, seed=tag, patient=True)
        assert all(heard.is_whole for heard in await gateway.over())
        # Each first token, each end, and in between what has gathered.
        assert gateway.num_token_frames <= 8 + 8 + LONG // PATIENT_TOKENS + 1


async def test_ends_by_stop_tokens_and_several_choices_are_whole(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": roomy()}) as stack:
        gateway = await stack.gateway()
        probe = gateway.heard[await gateway.submit(prompt(6), max_tokens=60, seed=5)]
        await gateway.over()
        stop = probe.token_ids[44]
        await gateway.submit(prompt(6), max_tokens=60, seed=5, patient=True, stop_token_ids=(stop,))
        await gateway.submit(prompt(7), max_tokens=60, seed=6, patient=True, n=3, num_logprobs=2)
        assert all(heard.is_whole for heard in await gateway.over())


def rounds_of(worker: LedgerWorker) -> list[int]:
    """The most rounds of each plan that has run rows."""
    schedules = [plan.schedule for plan in worker.plans if plan.schedule.rows]
    return [max(schedule.num_rounds, default=1) for schedule in schedules]


@pytest.fixture
def unhurried(monkeypatch):
    """Somebody who comes is no reason to expect others."""
    monkeypatch.setattr(multi_step, "_SHARE", 1000)


def num_rows_of_first_plan(worker: LedgerWorker) -> int:
    return next(len(plan.schedule.rows) for plan in worker.plans if plan.schedule.rows)


async def test_an_idle_worker_waits_for_company_until_somebody_is_in_a_hurry(
    redis_url, sockets, monkeypatch
):
    monkeypatch.setattr(company, "_LEAST_GAP_S", 60)
    monkeypatch.setattr(company, "_MOST_S", 60)
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for tag in range(3):
            await gateway.submit(prompt(9, tag), max_tokens=4, seed=tag, patient=True)
        await gateway.submit(prompt(9, 3), max_tokens=4, seed=3)
        assert all(heard.is_whole for heard in await gateway.over())
        assert num_rows_of_first_plan(worker) == 4


async def test_where_nobody_comes_it_begins(redis_url, sockets, monkeypatch):
    monkeypatch.setattr(company, "_LEAST_GAP_S", 0.05)
    monkeypatch.setattr(company, "_MOST_S", 60)
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(9), max_tokens=4, seed=1, patient=True)
        assert all(heard.is_whole for heard in await gateway.over())


async def test_who_is_aborted_meanwhile_is_not_computed(redis_url, sockets, monkeypatch):
    monkeypatch.setattr(company, "_LEAST_GAP_S", 60)
    monkeypatch.setattr(company, "_MOST_S", 60)
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        left = await gateway.submit(prompt(9), max_tokens=4, seed=1, patient=True)
        await until(lambda: stack.engine.lanes and stack.only_lane.assigned, "its place")
        await gateway.cancel(left)
        await gateway.over(left)
        await gateway.submit(prompt(9, 1), max_tokens=4, seed=2)
        await gateway.over()
        assert worker.num_sampled_tokens == 4


async def test_a_lane_that_takes_no_more_waits_for_nobody(redis_url, sockets, monkeypatch):
    monkeypatch.setattr(company, "_LEAST_GAP_S", 60)
    monkeypatch.setattr(company, "_MOST_S", 60)
    worker = roomy()
    worker.gate.clear()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for tag in range(8):
            await gateway.submit(prompt(9, tag), max_tokens=4, seed=tag, patient=True)
        # They fill two steps, and are there before the first one ends.
        await until(lambda: len(stack.engine.live) == 8, "all of them")
        worker.gate.set()
        assert all(heard.is_whole for heard in await gateway.over())


async def test_who_leaves_while_others_are_awaited_is_let_go_at_once(
    redis_url, sockets, monkeypatch
):
    """The first plan is computed, and the second one is put off."""
    monkeypatch.setattr(company, "_LEAST_GAP_S", 60)
    monkeypatch.setattr(company, "_MOST_S", 0.01)
    worker = roomy()
    worker.gate.clear()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        left = await gateway.submit(prompt(9), max_tokens=LONG, seed=1, patient=True)
        await until(lambda: worker.plans, "the first plan")
        await gateway.cancel(left)
        await gateway.over(left)
        worker.gate.set()


async def test_a_worker_that_leaves_gives_back_who_waits_there(redis_url, sockets, monkeypatch):
    monkeypatch.setattr(company, "_LEAST_GAP_S", 60)
    monkeypatch.setattr(company, "_MOST_S", 60)
    workers = {1: roomy(1), 2: roomy(2)}
    async with running_stack(redis_url, sockets, {"a": workers[1], "b": workers[2]}) as stack:
        gateway = await stack.gateway()
        lanes = stack.engine.lanes
        await until(lambda: len(lanes) == 2, "both lanes")
        waiting = await gateway.submit(prompt(9), max_tokens=4, seed=1, patient=True)
        await until(lambda: any(lane.assigned for lane in lanes.values()), "its place")
        [place] = [key for key, lane in lanes.items() if lane.assigned]
        workers[place].drain()
        [other] = workers.keys() - {place}
        await until(lambda: lanes[other].assigned, "another place")
        await gateway.submit(prompt(9, 1), max_tokens=4, seed=2)
        await gateway.over(waiting)


async def test_they_have_several_tokens_per_plan_and_end_where_they_should(
    redis_url, sockets, unhurried
):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for tag in range(8):
            await gateway.submit(
                prompt(9, tag), max_tokens=30 + tag, seed=tag, num_logprobs=tag % 3, patient=True
            )
        assert all(heard.is_whole for heard in await gateway.over())
        assert max(rounds_of(worker)) == multi_step.MOST_ROUNDS
        assert len(worker.plans) < 30
        # Nothing is computed behind a last token.
        assert worker.num_sampled_tokens == sum(30 + tag for tag in range(8))
        await worker.check()


async def test_beside_a_stream_each_plan_has_one_token_of_everybody(redis_url, sockets, unhurried):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(8), max_tokens=LONG, seed=1)
        await gateway.submit(prompt(9), max_tokens=LONG, seed=2, patient=True)
        assert all(heard.is_whole for heard in await gateway.over())
        assert set(rounds_of(worker)) == {1}


async def test_who_has_just_come_is_not_the_last(redis_url, sockets):
    """Each plan is a tenth as long as the time since somebody came, or has one round."""
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        came_at, found = 0.0, []

        def look(result: worker_pb2.StepResult) -> None:
            result.times.preparing_ns = result.times.sampling_ns = 0
            num_rounds = max(worker.plans[-1].schedule.num_rounds, default=1)
            result.times.forward_ns = num_rounds * 10**6
            found.append((time.monotonic() - came_at, num_rounds))

        worker.distort = look
        for tag in range(2):
            await asyncio.sleep(0.2)
            came_at = time.monotonic()
            await gateway.submit(prompt(9, tag), max_tokens=LONG, seed=tag, patient=True)
            assert all(heard.is_whole for heard in await gateway.over())
        assert found
        assert all(count == 1 or 0.001 * count <= 0.1 * elapsed for elapsed, count in found)


async def test_while_somebody_waits_for_a_row_plans_have_one_round(redis_url, sockets, unhurried):
    worker = LedgerWorker(1, num_blocks=1024, max_model_len=256, max_num_seqs=1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        for tag in range(2):
            await gateway.submit(prompt(9, tag), max_tokens=LONG, seed=tag, patient=True)
        await until(lambda: len(stack.engine.waiting) == 1, "the other one in the queue")
        worker.gate.set()
        assert all(heard.is_whole for heard in await gateway.over())
        rounds = rounds_of(worker)
        assert set(rounds[:LONG]) == {1}
        assert max(rounds[LONG:]) == multi_step.MOST_ROUNDS


async def test_what_runs_no_rows_says_nothing_of_rounds(redis_url, sockets, unhurried):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()

        def slow(result: worker_pb2.StepResult) -> None:
            result.times.forward_ns = 10**9 if worker.plans[-1].schedule.rows else 0

        worker.distort = slow
        for tag in range(3):
            await gateway.submit(prompt(9, tag), max_tokens=9, seed=tag, patient=True)
            await gateway.over()
            # The release of its row.
            await worker.check()
        assert set(rounds_of(worker)) == {1}


async def test_behind_a_stop_token_little_is_computed(redis_url, sockets, unhurried):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        probe = gateway.heard[await gateway.submit(prompt(6), max_tokens=60, seed=5)]
        await gateway.over()
        num_sampled, num_plans = worker.num_sampled_tokens, len(worker.plans)
        stop = probe.token_ids[44]
        length = probe.token_ids.index(stop) + 1
        asked = await gateway.submit(
            prompt(6), max_tokens=60, seed=5, patient=True, stop_token_ids=(stop,)
        )
        await gateway.over()
        assert gateway.heard[asked].token_ids == probe.token_ids[:length]
        most = multi_step.MOST_ROUNDS_TO_A_STOP
        assert max(rounds_of(worker)[num_plans - len(worker.plans) :]) == most
        # The rest of its plan, and the one sent ahead.
        assert worker.num_sampled_tokens - num_sampled - length <= most - 1 + most
        await worker.check()


async def test_a_row_that_fails_in_a_later_round_fails_alone(redis_url, sockets, unhurried):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        heard = await begun(stack, gateway, num_logprobs=2)

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
        await gateway.over()
        codes = [None if one.failure is None else one.failure.code for one in heard]
        assert codes == [None, INTERNAL, None]
        assert heard[0].is_whole
        assert heard[2].is_whole


def _without(logprobs: worker_pb2.Logprobs, at: int) -> None:
    start = sum(logprobs.num_entries[:at])
    end = start + logprobs.num_entries[at]
    del logprobs.num_entries[at]
    for field in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks):
        del field[start:end]


async def test_a_lost_worker_takes_nothing_from_them(redis_url, sockets):
    async with running_stack(
        redis_url, sockets, {"a": roomy()}, names=("a", "b"), drain_grace_s=5
    ) as stack:
        gateway = await stack.gateway()
        heard = await begun(stack, gateway)
        await stack.stop_worker("a")
        await stack.start_worker("b", roomy(2))
        await gateway.over()
        assert all(one.is_whole for one in heard)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "drained"])
async def test_a_new_leader_says_what_the_former_one_had_gathered(redis_url, sockets, is_killed):
    async with running_stack(redis_url, sockets, {"a": roomy()}) as stack:
        heard = await begun(stack, await stack.gateway())
        former, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.stands_by, "a standby")
        if is_killed:
            await former.kill()
            stack.lapse()
        else:
            await former.drain()
        gateway = await stack.gateway()
        for one in heard:
            await gateway.submit_again(one)
        assert all(again.is_whole for again in await gateway.over())


async def test_one_that_is_taken_over_by_a_stream_is_a_stream(redis_url, sockets):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        [asked, *_] = await begun(stack, first, max_tokens=200)
        worker.gate.clear()
        attachment = await other.attach(asked, 1)
        await until(lambda: asked.failure is not None, "the former stream's end")
        assert (asked.failure.code, info_of(asked.failure).reason) == (ABORTED, "TAKEN_OVER")
        frames = other.num_token_frames
        worker.gate.set()
        [heard] = await other.over(attachment)
        assert heard.is_whole
        # Each step's, but for those that were there before; some steps are heard of together.
        assert other.num_token_frames - frames > LONG // PATIENT_TOKENS + 2


async def test_one_that_is_cancelled_hears_so(redis_url, sockets):
    worker = roomy()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        [heard, *_] = await begun(stack, gateway, max_tokens=240)
        worker.gate.clear()
        [group] = [
            group
            for group in stack.engine.live.values()
            if group.key.request_id == heard.submission.request_id
        ]
        key = scheduler_pb2.RequestKey(request_id=heard.submission.request_id)
        await gateway.send(cancellations=[scheduler_pb2.Cancellation(request=key)])
        await until(lambda: group.error is not None, "the cancellation")
        worker.gate.set()
        await until(lambda: heard.failure is not None, "the end")
        assert heard.failure.code == CANCELLED
        await gateway.over()
