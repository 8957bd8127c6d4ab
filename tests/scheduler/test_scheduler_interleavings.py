"""What happens while a commit is on its way to Redis and back."""

from collections.abc import Callable
from pathlib import Path

import pytest
from grpc import StatusCode
from ledger_worker import LedgerWorker, token_at
from scheduler_stack import running_stack
from waiting import until

from quire.service.errors import failed
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import Commit, CommitReply

CANCELLED = failed(StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")


def during(
    monkeypatch: pytest.MonkeyPatch,
    is_meant: Callable[[Commit], bool],
    act: Callable[[], None],
) -> list[Commit]:
    """Acts once, before the reply to a commit that is meant; the list of such commits."""
    met: list[Commit] = []
    commit_to = Pool.commit

    async def commit_and_act(pool: Pool, commit: Commit) -> CommitReply:
        reply = await commit_to(pool, commit)
        if is_meant(commit):
            if not met:
                act()
            met.append(commit)
        return reply

    monkeypatch.setattr(Pool, "commit", commit_and_act)
    return met


async def test_a_cancel_while_the_first_choice_leaves_and_another_is_forked(
    redis_url, sockets, monkeypatch
):
    # One row: each choice is forked as the one before it leaves.
    worker = LedgerWorker(1, max_num_seqs=1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        engine = stack.engine

        def cancel() -> None:
            for group in list(engine.live.values()):
                engine.end(group, CANCELLED)

        met = during(
            monkeypatch,
            lambda commit: bool(commit.joined and commit.forgotten),
            cancel,
        )
        [heard] = await gateway.over(await gateway.submit([1, 2, 3], max_tokens=1, n=5))
        assert met
        assert heard.failure.code == StatusCode.CANCELLED.value[0]
        await until(lambda: not worker.rows, "the row's release")
        assert not engine.live
        [again] = await gateway.over(await gateway.submit([1, 2, 3], max_tokens=2, n=5))
        assert [choice.token_ids for choice in again.choices] == [again.output(i) for i in range(5)]
        await worker.check()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
async def test_a_request_is_considered_while_a_failed_row_s_sharer_goes_back(
    redis_url, sockets, depth
):
    worker = LedgerWorker(1)
    worker.failing_seeds.add(13)
    async with running_stack(redis_url, sockets, {}, names=("a",), pipeline_depth=depth) as stack:
        gateway = await stack.gateway()
        shared = list(range(8))
        bad = await gateway.submit([*shared, 1], seed=13)
        sharer = await gateway.submit([*shared, 2], seed=2)
        await until(lambda: gateway.heard[sharer].accepted, "acceptance")
        worker.gate.clear()
        await stack.start_worker("a", worker)
        await until(lambda: bool(worker.plans), "the plan with both")
        [lane] = stack.engine.lanes.values()
        other = await gateway.submit([3] * 9, seed=3)
        await until(lambda: gateway.heard[other].accepted, "acceptance")
        worker.gate.set()
        failure, *heard = await gateway.over(bad, sharer, other)
        assert failure.failure.code == StatusCode.INTERNAL.value[0]
        assert [one.token_ids for one in heard] == [one.tokens(4) for one in heard]
        await until(lambda: lane.is_empty, "an empty lane")
        await worker.check()


async def failing_beside_a_group(
    redis_url: str, sockets: Path, worker: LedgerWorker, depth: int, stop_at: int
) -> None:
    """A row fails whose prompt's first blocks a group shares; the group's first choice ends."""
    worker.failing_seeds.add(13)
    async with running_stack(
        redis_url, sockets, {}, names=("a",), pipeline_depth=depth, watermark=0
    ) as stack:
        gateway = await stack.gateway()
        shared = list(range(8))
        bad = await gateway.submit([*shared, 1], seed=13)
        stop = (token_at(2, 9 + stop_at),)
        good = await gateway.submit([*shared, 2], seed=2, n=3, stop_token_ids=stop)
        await until(lambda: gateway.heard[good].accepted, "acceptance")
        worker.gate.clear()
        await stack.start_worker("a", worker)
        await until(lambda: bool(worker.plans), "the plan with both")
        [lane] = stack.engine.lanes.values()
        await until(lambda: len(lane._flights) == depth, "as many plans as there may be")
        # One result, and what the scheduler makes of it.
        num_steps = lane.stats.num_steps
        worker.distort = lambda result: worker.gate.clear()
        worker.gate.set()
        await until(
            lambda: lane.stats.num_steps > num_steps and len(lane._flights) == depth,
            "the next plan",
        )
        worker.distort = lambda result: None
        worker.gate.set()
        failure, heard = await gateway.over(bad, good)
        assert failure.failure.code == StatusCode.INTERNAL.value[0]
        assert [choice.token_ids for choice in heard.choices] == [
            heard.output(choice) for choice in range(3)
        ]
        await until(lambda: not stack.engine.live, "the end of all")
        await worker.check()


async def test_choices_are_not_forked_from_blocks_that_a_failed_row_has_spoilt(redis_url, sockets):
    worker = LedgerWorker(1)
    await failing_beside_a_group(redis_url, sockets, worker, depth=1, stop_at=0)
    # They are computed anew, for none of the blocks can be trusted.
    assert not any(plan.copies.sources for plan in worker.plans)
    [again] = [plan.admissions for plan in worker.plans[1:] if plan.admissions.rows]
    assert list(again.num_computed_tokens) == [0, 8]


async def test_choices_do_not_wait_for_a_first_one_that_ended_off_its_row(redis_url, sockets):
    # No block is left for forks.
    worker = LedgerWorker(1, num_blocks=5, max_model_len=16)
    await failing_beside_a_group(redis_url, sockets, worker, depth=2, stop_at=1)
