"""Faults around the scheduler and their consequences."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from checking_worker import CheckingWorker
from scheduler_stack import (
    INTERNAL,
    Gateway,
    Received,
    ReceivedChoice,
    Stack,
    info_of,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import scheduler_pb2, worker_pb2
from scheduler_svc.core.crashes import MAX_CRASHES
from scheduler_svc.engine.dispatcher import Dispatcher
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.gateway.submission_conversion import record_of
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.requests import OutputRange, RecordOutcome, RequestKey, RequestRecord
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import PrefixMatch

RECORD = RequestRecord(
    key=RequestKey("", "left"), digest=b"", prompt_token_ids=(1,), params=b"", sequence_id=7
)


def submission(request_id: str, prompt: list[int], max_tokens: int) -> scheduler_pb2.Submission:
    params = scheduler_pb2.ResolvedParams(top_p=1, seed=1, max_tokens=max_tokens)
    return scheduler_pb2.Submission(request_id=request_id, prompt_token_ids=prompt, params=params)


async def serves(stack: Stack, seed: int = 1) -> None:
    """The next request works."""
    gateway = await stack.gateway()
    [received] = await gateway.wait_ended(
        await gateway.submit(prompt(9, seed), seed=seed, request_id=f"next-{seed}")
    )
    assert received.token_ids == received.tokens(4)


async def test_a_worker_with_two_addresses_has_one_lane(redis_url, sockets):
    async with running_stack(redis_url, sockets, {}, names=("a", "b")) as stack:
        worker = CheckingWorker(1)
        await stack.start_worker("a", worker, "b")
        await stack.ready()
        for seed in range(3):
            await serves(stack, seed)
        assert worker.num_streams == 1


async def test_a_lane_that_ends_during_a_match_is_assigned_nothing(redis_url, sockets, monkeypatch):
    engines: list[Engine] = []
    original, may_reply = asyncio.Event(), asyncio.Event()
    add, match = Engine.add, Dispatcher._match

    def noted_add(engine: Engine, *lane: object) -> None:
        add(engine, *lane)
        engines.append(engine)

    async def slow_match(
        dispatcher: Dispatcher, lanes: list, batch: list
    ) -> list[list[PrefixMatch | None]]:
        found = await match(dispatcher, lanes, batch)
        original.set()
        await may_reply.wait()
        return found

    monkeypatch.setattr(Engine, "add", noted_add)
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        await until(lambda: len(engines) == 2, "both lanes")
        monkeypatch.setattr(Dispatcher, "_match", slow_match)
        attachments = [await gateway.submit(prompt(8, seed), seed=seed) for seed in range(6)]
        await original.wait()
        engine = engines[0]
        # The lanes are equal: the first one is about to get the request.
        [chosen, _] = engine.lanes
        await stack.stop_worker("ab"[chosen - 1])
        await until(lambda: chosen not in engine.lanes, "the lane's end")
        may_reply.set()
        for received in await gateway.wait_ended(*attachments):
            assert received.token_ids == received.tokens(4)


def hold_slow_records(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> asyncio.Event:
    """Record requests whose ids begin with "slow" only after the event, or raise the error."""
    record, may_record = Store.record, asyncio.Event()

    async def slow_record(
        store: Store, records: list[RequestRecord], *args: list[bool]
    ) -> list[RecordOutcome]:
        if any(one.key.request_id.startswith("slow") for one in records):
            await may_record.wait()
            if error is not None:
                raise error
        return await record(store, records, *args)

    monkeypatch.setattr(Store, "record", slow_record)
    return may_record


async def cancel_by_id(gateway: Gateway, request_id: str, tag: int) -> bool:
    """Cancel a request; return whether it was found."""
    key = scheduler_pb2.RequestKey(request_id=request_id)
    await gateway.send(cancellations=[scheduler_pb2.Cancellation(request=key, tag=tag)])
    await until(lambda: tag in gateway.cancelled, "the result")
    return gateway.cancelled[tag]


async def test_a_request_that_is_recorded_slowly_delays_no_other(redis_url, sockets, monkeypatch):
    """As if only the part of Redis with its id did not respond."""
    may_record = hold_slow_records(monkeypatch)
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        running = await gateway.submit(prompt(9), seed=1, max_tokens=100_000)
        slow = [
            await gateway.submit(prompt(9), seed=seed, request_id=f"slow-{seed}")
            for seed in (2, 3, 4)
        ]
        await gateway.cancel(running)
        await gateway.cancel(slow[0])
        await gateway.detach(slow[1], client_gone=True)
        [received] = await gateway.wait_ended(await gateway.submit(prompt(9), seed=5))
        assert received.token_ids == received.tokens(4)
        await gateway.wait_ended(running)
        may_record.set()
        [received] = await gateway.wait_ended(slow[2])
        assert received.token_ids == received.tokens(4)
        # Its client has cancelled it meanwhile; that of the other has left.
        await until(lambda: not stack.engine.live, "no live request")
        assert info_of(gateway.received[slow[0]].failure).reason == "CANCELLED"
        assert not gateway.received[slow[1]].is_ended
        await serves(stack)


@pytest.mark.parametrize("error", [None, StoreUnavailable("no reply")])
async def test_a_request_is_cancelled_by_its_id_while_it_is_recorded(
    redis_url, sockets, monkeypatch, error
):
    """By any gateway. One that is not recorded fails as cancelled, and so is not sent again."""
    monkeypatch.setattr("scheduler_svc.gateway.submissions.RECORD_TIMEOUT_S", 0)
    may_record = hold_slow_records(monkeypatch, error)
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        sent = [
            await gateway.submit(prompt(9), max_tokens=100, request_id="slow") for _ in range(2)
        ]
        pending = stack.member.term.handler._submissions.pending
        await until(lambda: pending._counts.total() == len(sent), "the submissions")
        assert await cancel_by_id(other, "slow", 1)
        assert await cancel_by_id(gateway, "slow", 2)
        assert not await cancel_by_id(other, "unknown", 3)
        may_record.set()
        for received in await gateway.wait_ended(*sent):
            assert info_of(received.failure).reason == "CANCELLED"
        await until(lambda: not pending._counts, "the ends of the submissions")
        assert not pending._cancelled
        assert not await cancel_by_id(other, "slow", 4)


async def test_a_resubmitted_request_that_is_recorded_slowly_ends_at_its_stop_strings(
    redis_url, sockets, monkeypatch
):
    """As after a loss of its record: its gateway has found the stop strings before."""
    may_record = hold_slow_records(monkeypatch)
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        fields = {"request_id": "slow", "n": 3, "again": True}
        attachment = await gateway.submit(prompt(9), max_tokens=50, **fields)
        finishes = [
            scheduler_pb2.Finish(attachment=attachment, choice=choice, num_tokens=num_tokens)
            for choice, num_tokens in ((0, 2), (2, 3))
        ]
        await gateway.send(finishes=finishes)
        # A later frame was applied.
        await gateway.wait_ended(await gateway.submit(prompt(9)))
        may_record.set()
        [received] = await gateway.wait_ended(attachment)
    assert [choice.end.num_tokens for choice in received.choices] == [2, 50, 3]


async def test_equal_prompts_run_side_by_side_although_caching_is_off(redis_url, sockets):
    worker = CheckingWorker(1, num_blocks=129)
    async with running_stack(
        redis_url, sockets, {"a": worker}, enable_prefix_caching=False
    ) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        for seed in range(8):
            await gateway.submit(prompt(5), seed=seed, max_tokens=2)
        await until(lambda: all(one.accepted for one in gateway.received.values()), "acceptance")
        worker.gate.set()
        for received in await gateway.wait_ended():
            assert received.token_ids == received.tokens(2)
            assert received.end.num_cached_prompt_tokens == 0
        # Six prompts fill a step's budget; one by one there would never be more than three.
        assert worker.max_rows >= 6


DISTORTIONS: dict[str, Callable[[worker_pb2.StepResult], object]] = {
    "an unknown row": lambda result: result.sampled_rows.__setitem__(0, 7),
    "no token": lambda result: (result.sampled_rows.pop(), result.sampled_token_ids.pop()),
    "a row without its token": lambda result: result.sampled_token_ids.pop(),
    "an unknown failure": lambda result: result.failures.add(row=6, reason="?"),
    "no log-probabilities": lambda result: result.ClearField("logprobs"),
    "log-probabilities of no token": lambda result: result.logprobs.num_entries.append(1),
    "too few log-probabilities": lambda result: result.logprobs.ranks.pop(),
    "too many log-probabilities": lambda result: result.logprobs.num_entries.__setitem__(0, 3),
    "no log-probabilities of the prompt": lambda result: result.ClearField("prompt_logprobs"),
    "too few of the prompt": lambda result: result.prompt_logprobs.num_tokens.__setitem__(0, 6),
    "later ones of the prompt": lambda result: result.prompt_logprobs.first_indices.__setitem__(
        0, 2
    ),
    "another step": lambda result: setattr(result, "step", 12345),
}


@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.slow
async def test_an_invalid_result_ends_the_lane_and_its_request_continues_if_it_was_the_first(
    redis_url, sockets, distortion
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        distortions = [DISTORTIONS[distortion]]
        worker.distort = lambda result: distortions and distortions.pop()(result)
        attachment = await gateway.submit(prompt(8), num_logprobs=2, num_prompt_logprobs=1)
        [received] = await gateway.wait_ended(attachment)
        assert received.token_ids == received.tokens(4)
        assert worker.num_streams == 2
        await until(lambda: stack.only_lane.is_empty, "an empty lane")
        await worker.check()


async def test_only_the_request_whose_results_stay_invalid_fails(redis_url, sockets, monkeypatch):
    monkeypatch.setattr("scheduler_svc.engine.discovery.RETRY_S", 0.05)
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.distort = DISTORTIONS["another step"]
        [received] = await gateway.wait_ended(await gateway.submit(prompt(8)))
        assert received.failure.code == INTERNAL
        assert info_of(received.failure).reason == "POISON"
        # In a batch first, then alone on a worker that runs nothing else.
        assert worker.num_streams == 1 + MAX_CRASHES
        worker.distort = lambda result: None
        await serves(stack)
        await worker.check()


async def test_workers_of_another_model_take_over_when_the_last_one_is_lost(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        await serves(stack, 1)
        await stack.stop_worker("a")
        gateway = await stack.gateway()
        await until(lambda: not gateway.hello.ready, "the loss of the worker")
        waiting = await gateway.submit(prompt(20, 2), seed=2)
        await until(lambda: gateway.received[waiting].accepted, "acceptance")
        await stack.start_worker("a", CheckingWorker(2, fingerprint=b"other", block_size=8))
        [received] = await gateway.wait_ended(waiting)
        assert received.token_ids == received.tokens(4)


async def test_an_earlier_leaders_requests_continue(redis_url, sockets):
    received = Received(submission("left", prompt(8), max_tokens=4), [ReceivedChoice()])
    first, *rest = received.tokens(4)
    store = Store.at(redis_url)
    await store.lease.acquire("10.0.0.7:50052", lease_ms=1000)
    record = record_of(received.submission, sequence_id=7)
    assert await store.record([record], [False]) == [RecordOutcome.NEW]
    await store.append_output([OutputRange(record.key, 0, 0, [first])])
    await store.lease.release()
    await store.close()
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        [whole] = await gateway.wait_ended(await gateway.attach(received))
        assert whole.token_ids == [first, *rest]
        [tail] = await gateway.wait_ended(await gateway.attach(received, 2))
        assert tail.is_whole


async def test_a_record_that_may_have_been_written_is_discarded(redis_url, redis_client):
    store = Store.at(redis_url)
    await store.lease.acquire("10.0.0.7:50052", lease_ms=1000)
    record_writer = RecordWriter(store, finished_ttl_s=60, finished_max_bytes=2**20)
    await store.record([RECORD], [False])
    record_writer.discard([RECORD])
    await record_writer.flush()
    assert not redis_client.keys("*left*")
    assert await store.record([RECORD], [False]) == [RecordOutcome.NEW]
    # Another request of that id stays.
    record_writer.discard([replace(RECORD, sequence_id=8)])
    await record_writer.flush()
    assert redis_client.keys("*left*")
    await store.discard([RECORD])
    await store.close()
