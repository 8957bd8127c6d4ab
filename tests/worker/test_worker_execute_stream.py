"""The Execute stream: sampling, rows, fencing, order, failures, draining."""

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from tiny_models import Reference, llama, save_model
from worker_driver import (
    STEPS_QUEUE_UP,
    Driver,
    LaneClient,
    Sampling,
    Sequence,
    ServedWorker,
    admit,
    append,
    schedule,
    served,
    served_model,
    worker_settings,
)

from quire.internal.v1 import worker_pb2
from quire.service.protocol_version import PROTOCOL_VERSION
from worker_svc.loading.runner_loading import load_runner

_PROMPT = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=STEPS_QUEUE_UP)
async def worker(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[ServedWorker]:
    sizes = {"swap_space": 2**16, "num_blocks": 300}
    async with served_model(model, steps_queue_up=request.param, **sizes) as worker:
        yield worker


@pytest.fixture
async def lane(worker: ServedWorker) -> LaneClient:
    lane = LaneClient(worker.stub)
    await lane.open()
    return lane


def sequence(row: int = 0, tokens: list[int] = _PROMPT, **sampling: float) -> Sequence:
    return Sequence(row, list(tokens), len(tokens), sampling=Sampling(**sampling))  # type: ignore[arg-type]


def whole(sequence: Sequence, free: list[int]) -> worker_pb2.BatchPlan:
    """Admit a sequence and run all its tokens."""
    plan = worker_pb2.BatchPlan()
    sequence.blocks_for(len(sequence.tokens) + 1, free)
    admit(plan, sequence)
    schedule(plan, sequence.row, len(sequence.tokens) - sequence.num_computed_tokens)
    return plan


async def hold(worker: ServedWorker) -> threading.Event:
    """Keep the device busy until the event is set."""
    started, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        loop.call_soon_threadsafe(started.set)
        release.wait()

    worker.thread.submit(wait)
    await started.wait()
    return release


async def test_same_seed_same_tokens_alone_and_in_a_batch(lane: LaneClient) -> None:
    driver = Driver(lane)
    alone = sequence(temperature=1.0, top_p=0.95, seed=11)
    await driver.run([alone], 16)
    batch = [
        sequence(row, temperature=1.0, top_p=0.95, seed=11 if row == 20 else row)
        for row in range(32)
    ]
    driver.free = list(range(299, 0, -1))
    await driver.run(batch, 16)
    assert batch[20].tokens == alone.tokens
    assert len({tuple(s.tokens) for s in batch}) > 20


async def test_shared_prefix_and_reused_rows(lane: LaneClient, model: Path) -> None:
    expected = Reference(model).generate(_PROMPT, 8)
    driver = Driver(lane)
    first = sequence()
    await driver.run([first], 8)
    # Same row; the first two blocks, 8 tokens, are those of the released sequence.
    second = sequence()
    second.block_ids = first.block_ids[:2]
    second.num_computed_tokens = 8
    await driver.run([second], 8)
    assert first.tokens[len(_PROMPT) :] == second.tokens[len(_PROMPT) :] == expected


async def test_two_sequences_of_one_plan_share_the_blocks_it_fills(
    lane: LaneClient, model: Path
) -> None:
    filler, sharer = sequence(0), sequence(1)
    plan = worker_pb2.BatchPlan()
    free = [4, 3, 2, 1]
    filler.blocks_for(len(_PROMPT), free)
    admit(plan, filler)
    schedule(plan, 0, len(_PROMPT))
    sharer.block_ids, sharer.num_computed_tokens = [1, 2, 9], 8
    admit(plan, sharer)
    schedule(plan, 1, len(_PROMPT) - 8)
    result = await lane.run(plan)
    assert list(result.sampled_token_ids) == Reference(model).generate(_PROMPT, 1) * 2


async def test_preempted_sequence_returns_with_all_its_tokens(
    lane: LaneClient, model: Path
) -> None:
    expected = Reference(model).generate(_PROMPT, 12)
    driver = Driver(lane)
    before = sequence(3)
    await driver.run([before], 5)
    back = Sequence(9, list(before.tokens), len(_PROMPT))
    await driver.run([back], 12)
    assert back.tokens[len(_PROMPT) :] == expected


async def test_plans_sent_ahead_see_the_tokens_before_them(lane: LaneClient, model: Path) -> None:
    expected = Reference(model).generate(_PROMPT, 4)
    await lane.send(whole(sequence(), [4, 3, 2, 1]))
    for _ in range(3):
        plan = worker_pb2.BatchPlan()
        schedule(plan, 0, 1)
        if lane.step == 1:
            append(plan, 0, [5])
        await lane.send(plan)
    results = [await lane.result() for _ in range(4)]
    assert [r.step for r in results] == [1, 2, 3, 4]
    assert [r.sampled_token_ids[0] for r in results] == expected


async def test_blocks_survive_a_swap_and_a_copy(lane: LaneClient, model: Path) -> None:
    expected = Reference(model).generate(_PROMPT, 2)
    first = await lane.run(whole(sequence(), [3, 2, 1]))
    assert first.sampled_token_ids[0] == expected[0]
    out = worker_pb2.BatchPlan(
        released_rows=[0],
        swap_outs=worker_pb2.BlockMoves(sources=[1, 2, 3], destinations=[0, 1, 2]),
        copies=worker_pb2.BlockMoves(sources=[7, 7, 7], destinations=[1, 2, 3]),
    )
    await lane.run(out)
    back = sequence(5, [*_PROMPT, expected[0]])
    back.block_ids, back.num_computed_tokens = [20, 21, 22], len(_PROMPT)
    plan = whole(back, [23])
    plan.swap_ins.CopyFrom(worker_pb2.BlockMoves(sources=[0, 1, 2], destinations=[20, 31, 22]))
    plan.copies.CopyFrom(worker_pb2.BlockMoves(sources=[31], destinations=[21]))
    assert list((await lane.run(plan)).sampled_token_ids) == [expected[1]]


async def test_a_fork_continues_beside_its_parent(lane: LaneClient, model: Path) -> None:
    expected = Reference(model).generate(_PROMPT, 3)
    await lane.run(whole(sequence(), [3, 2, 1]))
    # The sibling shares what is full before the prompt's last token, and copies the rest, in which
    # the parent writes in this same plan.
    sibling = sequence(1)
    sibling.block_ids, sibling.num_computed_tokens = [1, 2, 9], len(_PROMPT) - 1
    fork = whole(sibling, [])
    schedule(fork, 0, 1)
    fork.copies.CopyFrom(worker_pb2.BlockMoves(sources=[3], destinations=[9]))
    result = await lane.run(fork)
    assert dict(zip(result.sampled_rows, result.sampled_token_ids, strict=True)) == {
        0: expected[1],
        1: expected[0],
    }
    both = worker_pb2.BatchPlan()
    append(both, 0, [4])
    schedule(both, 0, 1)
    schedule(both, 1, 1)
    assert list((await lane.run(both)).sampled_token_ids) == [expected[2], expected[1]]


async def test_copies_of_one_plan_may_exchange_blocks(lane: LaneClient, model: Path) -> None:
    expected = Reference(model).generate(_PROMPT, 2)
    await lane.run(whole(sequence(), [3, 2, 1]))
    exchange = worker_pb2.BatchPlan(
        released_rows=[0], copies=worker_pb2.BlockMoves(sources=[1, 2], destinations=[2, 1])
    )
    await lane.run(exchange)
    back = sequence(0, [*_PROMPT, expected[0]])
    back.block_ids, back.num_computed_tokens = [2, 1, 3], len(_PROMPT)
    assert list((await lane.run(whole(back, [4]))).sampled_token_ids) == [expected[1]]


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        ({"swap_outs": (1, 0), "swap_ins": (1, 2)}, "out and in"),
        ({"swap_outs": (300, 0)}, "1 to 299"),
        ({"swap_outs": (1, 10**6)}, "blocks to move"),
        ({"swap_ins": (0, 0)}, "1 to 299"),
        ({"copies": (0, 1)}, "1 to 299"),
    ],
)
async def test_moves_that_cannot_be_are_refused(
    lane: LaneClient, moves: dict[str, tuple[int, int]], words: str
) -> None:
    pairs = {
        name: worker_pb2.BlockMoves(sources=[source], destinations=[destination])
        for name, (source, destination) in moves.items()
    }
    await lane.send(worker_pb2.BatchPlan(**pairs))
    assert await lane.ended() == grpc.StatusCode.INTERNAL
    assert words in await lane.call.details()


async def test_more_tokens_than_a_step_may_have_are_refused(model: Path) -> None:
    async with served_model(model, max_num_batched_tokens=10, max_num_seqs=4) as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        await lane.send(whole(sequence(), [3, 2, 1]))
        assert await lane.ended() == grpc.StatusCode.INTERNAL
        assert "11 tokens scheduled, at most 10" in await lane.call.details()


async def test_an_empty_plan_gives_an_empty_result(lane: LaneClient) -> None:
    result = await lane.run(worker_pb2.BatchPlan())
    assert (list(result.sampled_rows), list(result.failures)) == ([], [])


async def test_logprobs_where_asked(lane: LaneClient) -> None:
    asking, quiet = sequence(0, num_logprobs=3), sequence(1)
    plan = whole(asking, [10, 11, 12])
    quiet.blocks_for(len(_PROMPT), free := [13, 14, 15])
    assert not free
    admit(plan, quiet)
    schedule(plan, 1, len(_PROMPT))
    logprobs = (await lane.run(plan)).logprobs
    assert list(logprobs.num_entries) == [3, 0]
    assert list(logprobs.ranks) == [1, 1, 2]
    assert logprobs.token_ids[0] == logprobs.token_ids[1]
    assert logprobs.logprobs[0] == logprobs.logprobs[1] >= logprobs.logprobs[2]


async def test_a_failing_row_fails_alone(
    worker: ServedWorker, lane: LaneClient, model: Path
) -> None:
    assert worker.loaded is not None
    poisoned = 200
    weights = worker.loaded.runner.runner._model.network.get_input_embeddings().weight
    weights.data[poisoned] = float("nan")
    plan = whole(sequence(0, [1, 2, poisoned]), [2])
    healthy = sequence(1)
    healthy.blocks_for(len(_PROMPT) + 1, [6, 5, 4])
    admit(plan, healthy)
    schedule(plan, 1, len(_PROMPT))
    result = await lane.run(plan)
    assert [(f.row, "finite" in f.reason) for f in result.failures] == [(0, True)]
    assert list(result.sampled_rows) == [1]
    assert list(result.sampled_token_ids) == Reference(model).generate(_PROMPT, 1)
    # A plan that was already on its way schedules the row once more.
    again = worker_pb2.BatchPlan()
    schedule(again, 0, 1)
    assert [f.row for f in (await lane.run(again)).failures] == [0]


async def test_a_step_that_fails_ends_the_stream(worker: ServedWorker, lane: LaneClient) -> None:
    plan = worker_pb2.BatchPlan()
    schedule(plan, 0, 1)
    # Otherwise the stream may end before the second plan is sent.
    release = await hold(worker)
    await lane.send(plan)
    await lane.send(worker_pb2.BatchPlan())
    release.set()
    assert await lane.ended() == grpc.StatusCode.INTERNAL
    assert "no sequence held: rows [0]" in await lane.call.details()
    # The next stream finds an empty, working worker.
    again = LaneClient(worker.stub)
    assert (await again.open()).last_finished_step == 0
    assert (await again.run(whole(sequence(), [3, 2, 1]))).sampled_rows == [0]


async def test_a_plan_that_cannot_be_run_costs_no_result_of_those_before_it(
    worker: ServedWorker, lane: LaneClient
) -> None:
    release = await hold(worker)
    await lane.send(whole(sequence(), [3, 2, 1]))
    wrong = worker_pb2.BatchPlan()
    schedule(wrong, 5, 1)
    await lane.send(wrong)
    await lane.send(worker_pb2.BatchPlan())
    assert worker.servicer._stream is not None
    while worker.servicer._stream._last_step < 3:
        await worker.stub.Identify(worker_pb2.IdentifyRequest())
    release.set()
    assert (await lane.result()).sampled_rows == [0]
    assert await lane.ended() == grpc.StatusCode.INTERNAL
    assert "step 2 failed: no sequence held: rows [5]" in await lane.call.details()


@pytest.mark.parametrize("step", [1, 2])
async def test_repeated_and_older_steps_are_refused(lane: LaneClient, step: int) -> None:
    await lane.send(worker_pb2.BatchPlan(), step=2)
    assert (await lane.result()).step == 2
    await lane.send(worker_pb2.BatchPlan(), step=step)
    assert await lane.ended() == grpc.StatusCode.FAILED_PRECONDITION


async def test_older_epochs_other_holders_and_versions_are_refused(worker: ServedWorker) -> None:
    await LaneClient(worker.stub, epoch=7).open()
    for other, words in (
        (LaneClient(worker.stub, epoch=6), ("6", "7")),
        (LaneClient(worker.stub, epoch=7, holder=b"other"), (b"other".hex(), b"holder".hex())),
        (LaneClient(worker.stub, epoch=8, protocol_version=99), ("99", str(PROTOCOL_VERSION))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await other.open()
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert all(word in (refused.value.details() or "") for word in words)


async def test_identify_returns_while_the_device_is_busy_and_leaves_the_lane(
    worker: ServedWorker, lane: LaneClient
) -> None:
    other = LaneClient(worker.stub)
    incarnation = (await other.open()).incarnation
    release = await hold(worker)
    await other.send(whole(sequence(), [1, 2, 3]))
    identity = await worker.stub.Identify(worker_pb2.IdentifyRequest(), timeout=5)
    assert identity.incarnation == incarnation
    release.set()
    assert len((await other.result()).sampled_rows) == 1


async def test_a_newer_stream_ends_the_older_one(worker: ServedWorker, lane: LaneClient) -> None:
    assert (await lane.run(whole(sequence(), [3, 2, 1]))).sampled_rows == [0]
    release = await hold(worker)
    decode = worker_pb2.BatchPlan()
    schedule(decode, 0, 1)
    await lane.send(decode)
    newer = LaneClient(worker.stub, epoch=2)
    opening = asyncio.create_task(newer.open())
    assert await lane.ended() == grpc.StatusCode.ABORTED
    # It waits for what the device is doing.
    assert not opening.done()
    release.set()
    assert (await opening).last_finished_step == 1
    # The old rows are gone, their blocks are not: 8 tokens need no computing.
    again = sequence()
    again.block_ids, again.num_computed_tokens = [1, 2, 3], 8
    newer.step = 5
    first = await newer.run(whole(again, []))
    assert first.step == 6
    assert first.sampled_rows == [0]


async def test_closing_the_lane_flushes_its_results(worker: ServedWorker, lane: LaneClient) -> None:
    release = await hold(worker)
    await lane.send(whole(sequence(), [3, 2, 1]))
    await lane.send(worker_pb2.BatchPlan(released_rows=[0]))
    await lane.call.done_writing()
    release.set()
    assert (await lane.result()).sampled_rows == [0]
    assert (await lane.result()).step == 2
    assert await lane.ended() == grpc.StatusCode.OK


async def test_heartbeats_go_on_while_a_step_runs(worker: ServedWorker, lane: LaneClient) -> None:
    await lane.run(worker_pb2.BatchPlan())
    release = await hold(worker)
    await lane.send(worker_pb2.BatchPlan())
    response = await lane.call.read()
    release.set()
    assert response.heartbeat.last_finished_step == 1
    assert not response.heartbeat.draining


async def test_draining_is_reported_at_once_and_ends_with_the_lane(
    worker: ServedWorker, lane: LaneClient
) -> None:
    draining = asyncio.create_task(worker.servicer.drain())
    response = await lane.call.read()
    assert response.heartbeat.draining
    assert (await lane.run(whole(sequence(), [3, 2, 1]))).sampled_rows == [0]
    assert not draining.done()
    await lane.call.done_writing()
    await draining


async def test_unavailable_until_the_model_is_loaded(model: Path) -> None:
    async with served(None) as worker:
        lane = LaneClient(worker.stub)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await lane.open()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        loaded = await asyncio.wrap_future(
            worker.thread.submit(partial(load_runner, worker_settings(model)))
        )
        worker.servicer.serve(loaded)
        assert (await LaneClient(worker.stub).open()).num_blocks == 200


async def test_identify_waits_until_the_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.service.servicer._LOAD_WAIT_S", 60.0)
    async with served(None) as worker:
        identifying = worker.stub.Identify(worker_pb2.IdentifyRequest())
        loaded = await asyncio.wrap_future(
            worker.thread.submit(partial(load_runner, worker_settings(model)))
        )
        assert not identifying.done()
        worker.servicer.serve(loaded)
        identified = await identifying
        assert identified.incarnation == (await LaneClient(worker.stub).open()).incarnation


@pytest.mark.parametrize("stops", [False, True])
async def test_identify_waits_for_no_model_that_does_not_come(
    stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.service.servicer._LOAD_WAIT_S", 60.0 if stops else 0.0)
    async with served(None) as worker:
        identifying = worker.stub.Identify(worker_pb2.IdentifyRequest())
        if stops:
            worker.servicer.abort_stream()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await identifying
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_unwritten_blocks_are_never_read(model: Path) -> None:
    loaded = load_runner(worker_settings(model))
    for caches in loaded.runner.runner._pool.layers:
        for cache in caches:
            cache.fill_(float("nan"))
    expected = Reference(model).generate(_PROMPT, 10)
    async with served(loaded) as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        sequences = [sequence(0), sequence(1, _PROMPT[:2]), sequence(2, _PROMPT * 4)]
        await Driver(lane).run(sequences, 10)
    assert sequences[0].tokens[len(_PROMPT) :] == expected
