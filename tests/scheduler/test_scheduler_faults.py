"""What goes wrong around the scheduler, and what it must not make of it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from ledger_worker import LedgerWorker
from scheduler_stack import INTERNAL, Heard, HeardChoice, Stack, info_of, prompt, running_stack
from waiting import until

from quire.internal.v1 import scheduler_pb2, worker_pb2
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.dispatch import Dispatcher
from scheduler_svc.engine import Engine
from scheduler_svc.gateways.submission import record_of
from scheduler_svc.lanes.names import Names
from scheduler_svc.store.requests import OutputRun, Recorded, RequestKey, RequestRecord
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
    [heard] = await gateway.over(
        await gateway.submit(prompt(9, seed), seed=seed, request_id=f"next-{seed}")
    )
    assert heard.token_ids == heard.tokens(4)


async def test_a_worker_that_comes_up_at_two_addresses_is_one_lane(redis_url, sockets):
    async with running_stack(redis_url, sockets, {}, names=("a", "b")) as stack:
        worker = LedgerWorker(1)
        await stack.start_worker("a", worker, "b")
        await stack.ready()
        for seed in range(3):
            await serves(stack, seed)
        assert worker.num_streams == 1


async def test_a_lane_that_ends_while_caches_are_asked_is_given_nothing(
    redis_url, sockets, monkeypatch
):
    engines: list[Engine] = []
    asked, answer = asyncio.Event(), asyncio.Event()
    add, match = Engine.add, Dispatcher._match

    def noted_add(engine: Engine, *lane: object) -> None:
        add(engine, *lane)
        engines.append(engine)

    async def slow_match(
        dispatcher: Dispatcher, lanes: list, batch: list
    ) -> list[list[PrefixMatch | None]]:
        found = await match(dispatcher, lanes, batch)
        asked.set()
        await answer.wait()
        return found

    monkeypatch.setattr(Engine, "add", noted_add)
    workers = {name: LedgerWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        await until(lambda: len(engines) == 2, "both lanes")
        monkeypatch.setattr(Dispatcher, "_match", slow_match)
        attachments = [await gateway.submit(prompt(8, seed), seed=seed) for seed in range(6)]
        await asked.wait()
        engine = engines[0]
        # Nothing tells the lanes apart: the first one is about to get the request.
        [chosen, _] = engine.lanes
        await stack.stop_worker("ab"[chosen - 1])
        await until(lambda: chosen not in engine.lanes, "the lane's end")
        answer.set()
        for heard in await gateway.over(*attachments):
            assert heard.token_ids == heard.tokens(4)


async def test_equal_prompts_run_side_by_side_although_caching_is_off(redis_url, sockets):
    worker = LedgerWorker(1, num_blocks=129)
    async with running_stack(
        redis_url, sockets, {"a": worker}, enable_prefix_caching=False
    ) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        for seed in range(8):
            await gateway.submit(prompt(5), seed=seed, max_tokens=2)
        await until(lambda: all(one.accepted for one in gateway.heard.values()), "acceptance")
        worker.gate.set()
        for heard in await gateway.over():
            assert heard.token_ids == heard.tokens(2)
            assert heard.end.num_cached_prompt_tokens == 0
        # Six prompts fill a step's budget; one by one there would never be more than three.
        assert worker.max_rows >= 6


DISTORTIONS: dict[str, Callable[[worker_pb2.StepResult], object]] = {
    "an unknown row": lambda result: result.sampled_rows.__setitem__(0, 7),
    "no token": lambda result: (result.sampled_rows.pop(), result.sampled_token_ids.pop()),
    "a row without its token": lambda result: result.sampled_token_ids.pop(),
    "an unknown failure": lambda result: result.failures.add(row=6, reason="?"),
    "no log-probabilities": lambda result: result.ClearField("logprobs"),
    "log-probabilities of nobody": lambda result: result.logprobs.num_entries.append(1),
    "too few log-probabilities": lambda result: result.logprobs.ranks.pop(),
    "too many log-probabilities": lambda result: result.logprobs.num_entries.__setitem__(0, 3),
    "another step": lambda result: setattr(result, "step", 12345),
}


@pytest.mark.parametrize("distortion", DISTORTIONS)
async def test_a_result_that_is_none_ends_the_lane_and_its_request_goes_on_if_it_was_once(
    redis_url, sockets, distortion
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        distortions = [DISTORTIONS[distortion]]
        worker.distort = lambda result: distortions and distortions.pop()(result)
        [heard] = await gateway.over(await gateway.submit(prompt(8), num_logprobs=2))
        assert heard.token_ids == heard.tokens(4)
        assert worker.num_streams == 2
        await until(lambda: stack.only_lane.is_empty, "an empty lane")
        await worker.check()


async def test_a_request_whose_results_are_none_twice_fails_and_nobody_else(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.distort = DISTORTIONS["another step"]
        [heard] = await gateway.over(await gateway.submit(prompt(8)))
        assert heard.failure.code == INTERNAL
        assert info_of(heard.failure).reason == "POISON"
        # Beside others first, then alone.
        assert worker.num_streams == 2
        worker.distort = lambda result: None
        await serves(stack)
        await worker.check()


async def test_workers_of_another_model_take_over_when_the_last_one_is_gone(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        await serves(stack, 1)
        await stack.stop_worker("a")
        gateway = await stack.gateway()
        await until(lambda: not gateway.hello.ready, "the loss of the worker")
        waiting = await gateway.submit(prompt(20, 2), seed=2)
        await until(lambda: gateway.heard[waiting].accepted, "acceptance")
        await stack.start_worker("a", LedgerWorker(2, fingerprint=b"other", block_size=8))
        [heard] = await gateway.over(waiting)
        assert heard.token_ids == heard.tokens(4)


async def test_a_former_leader_s_requests_go_on(redis_url, sockets):
    heard = Heard(submission("left", prompt(8), max_tokens=4), [HeardChoice()])
    first, *rest = heard.tokens(4)
    store = await Store.connect(redis_url)
    await store.take_lead("10.0.0.7:50052", lease_ms=1000)
    record = record_of(heard.submission, sequence_id=7)
    assert await store.record([record], [False]) == [Recorded.NEW]
    await store.fold([OutputRun(record.key, 0, 0, [first])])
    await store.release_lead()
    await store.close()
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        [whole] = await gateway.over(await gateway.attach(heard))
        assert whole.token_ids == [first, *rest]
        [tail] = await gateway.over(await gateway.attach(heard, 2))
        assert tail.is_whole


async def test_a_record_that_may_have_been_written_is_taken_back(redis_url, redis_client):
    store = await Store.connect(redis_url)
    await store.take_lead("10.0.0.7:50052", lease_ms=1000)
    recorder = Recorder(store, finished_ttl_s=60, finished_max_bytes=2**20)
    await store.record([RECORD], [False])
    recorder.unanswered([RECORD])
    await recorder.flush()
    assert not redis_client.keys("*left*")
    assert await store.record([RECORD], [False]) == [Recorded.NEW]
    # Another request of that id stays.
    recorder.unanswered([replace(RECORD, sequence_id=8)])
    await recorder.flush()
    assert redis_client.keys("*left*")
    await store.discard([RECORD])
    await store.close()


async def test_names_that_do_not_resolve_hold_nobody_up():
    names = Names(
        ("localhost:50053", "unix:/run/worker.sock", "no-such-host.invalid:1"), lambda: None
    )
    looking = asyncio.create_task(names.run())
    await until(lambda: len(names.addresses) >= 2, "the names that resolve")
    assert "unix:/run/worker.sock" in names.addresses
    assert all(address.endswith((":50053", ".sock")) for address in names.addresses)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_a_name_is_news_when_it_stands_for_something_else(monkeypatch):
    answers = [frozenset({"10.0.0.1:1"})] * 5 + [frozenset({"10.0.0.2:1"})] * 5
    left, news = iter(answers), []

    async def resolve(name: str) -> frozenset[str]:
        return next(left, answers[-1])

    monkeypatch.setattr("scheduler_svc.lanes.names._resolve", resolve)
    monkeypatch.setattr("scheduler_svc.lanes.names.LOOKUP_INTERVAL_S", 0)
    names = Names(("worker:1",), lambda: news.append(names.addresses))
    looking = asyncio.create_task(names.run())
    await until(lambda: left.__length_hint__() == 0, "all answers")
    assert news == [answers[0], answers[-1]]
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
