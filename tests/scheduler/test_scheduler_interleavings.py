"""Events during a commit, between its start and its reply."""

from collections.abc import Callable
from pathlib import Path

import pytest
from checking_worker import CheckingWorker, token_at
from grpc import StatusCode
from scheduler_stack import num_in_flight, running_stack
from waiting import until

from quire.service.errors import failed
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import Commit, CommitReply

CANCELLED = failed(StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")


def during(
    monkeypatch: pytest.MonkeyPatch,
    matches: Callable[[Commit], bool],
    act: Callable[[], None],
) -> list[Commit]:
    """Run `act` once, before the reply to a matching commit; the list of matching commits."""
    met: list[Commit] = []
    commit_to = Pool.commit

    async def commit_and_act(pool: Pool, commit: Commit) -> CommitReply:
        reply = await commit_to(pool, commit)
        if matches(commit):
            if not met:
                act()
            met.append(commit)
        return reply

    monkeypatch.setattr(Pool, "commit", commit_and_act)
    return met


async def test_a_cancel_while_the_first_choice_is_released_and_another_is_forked(
    redis_url, sockets, monkeypatch
):
    # One row: each choice is forked when the one before it is released.
    worker = CheckingWorker(1, max_num_seqs=1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        engine = stack.engine

        def cancel() -> None:
            for group in list(engine.live.values()):
                engine.abort(group, CANCELLED)

        met = during(
            monkeypatch,
            lambda commit: bool(commit.added and commit.removed),
            cancel,
        )
        [received] = await gateway.wait_ended(await gateway.submit([1, 2, 3], max_tokens=1, n=5))
        assert met
        assert received.failure.code == StatusCode.CANCELLED.value[0]
        await until(lambda: not worker.rows, "the row's release")
        assert not engine.live
        [again] = await gateway.wait_ended(await gateway.submit([1, 2, 3], max_tokens=2, n=5))
        assert [choice.token_ids for choice in again.choices] == [again.output(i) for i in range(5)]
        await worker.check()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
async def test_a_request_is_matched_while_the_sharer_of_a_failed_row_is_requeued(
    redis_url, sockets, depth
):
    worker = CheckingWorker(1)
    worker.failing_seeds.add(13)
    async with running_stack(redis_url, sockets, {}, names=("a",), pipeline_depth=depth) as stack:
        gateway = await stack.gateway()
        shared = list(range(8))
        bad = await gateway.submit([*shared, 1], seed=13)
        sharer = await gateway.submit([*shared, 2], seed=2)
        await until(lambda: gateway.received[sharer].accepted, "acceptance")
        worker.gate.clear()
        await stack.start_worker("a", worker)
        await until(lambda: bool(worker.plans), "the plan with both")
        [lane] = stack.engine.lanes.values()
        other = await gateway.submit([3] * 9, seed=3)
        await until(lambda: gateway.received[other].accepted, "acceptance")
        worker.gate.set()
        failure, *received = await gateway.wait_ended(bad, sharer, other)
        assert failure.failure.code == StatusCode.INTERNAL.value[0]
        assert [one.token_ids for one in received] == [one.tokens(4) for one in received]
        await until(lambda: lane.is_empty, "an empty lane")
        await worker.check()


async def failing_beside_a_group(
    redis_url: str, sockets: Path, worker: CheckingWorker, depth: int, stop_at: int
) -> None:
    """A row fails whose first prompt blocks a group shares; the group's first choice ends."""
    worker.failing_seeds.add(13)
    async with running_stack(
        redis_url, sockets, {}, names=("a",), pipeline_depth=depth, watermark=0
    ) as stack:
        gateway = await stack.gateway()
        shared = list(range(8))
        bad = await gateway.submit([*shared, 1], seed=13)
        stop = (token_at(2, 9 + stop_at),)
        good = await gateway.submit([*shared, 2], seed=2, n=3, stop_token_ids=stop)
        await until(lambda: gateway.received[good].accepted, "acceptance")
        worker.gate.clear()
        await stack.start_worker("a", worker)
        await until(lambda: bool(worker.plans), "the plan with both")
        [lane] = stack.engine.lanes.values()
        await until(lambda: num_in_flight(lane) == depth, "as many plans as there may be")
        # One result, and the step that follows it.
        num_steps = lane.stats.num_steps
        worker.distort = lambda result: worker.gate.clear()
        worker.gate.set()
        await until(
            lambda: lane.stats.num_steps > num_steps and num_in_flight(lane) == depth,
            "the next plan",
        )
        worker.distort = lambda result: None
        worker.gate.set()
        failure, received = await gateway.wait_ended(bad, good)
        assert failure.failure.code == StatusCode.INTERNAL.value[0]
        assert [choice.token_ids for choice in received.choices] == [
            received.output(choice) for choice in range(3)
        ]
        await until(lambda: not stack.engine.live, "the end of all")
        await worker.check()


async def test_choices_are_not_forked_from_blocks_that_a_failed_row_invalidated(redis_url, sockets):
    worker = CheckingWorker(1)
    await failing_beside_a_group(redis_url, sockets, worker, depth=1, stop_at=0)
    # They are recomputed, because none of the blocks is valid.
    assert not any(plan.copies.sources for plan in worker.plans)
    [again] = [plan.admissions for plan in worker.plans[1:] if plan.admissions.rows]
    assert list(again.num_computed_tokens) == [0, 8]


async def test_choices_do_not_wait_for_a_first_choice_that_ended_without_a_row(redis_url, sockets):
    # No free blocks for forks.
    worker = CheckingWorker(1, num_blocks=5, max_model_len=16)
    await failing_beside_a_group(redis_url, sockets, worker, depth=2, stop_at=1)
