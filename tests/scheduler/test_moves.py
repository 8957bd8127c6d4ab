"""Waiting requests of one shard move to another that has room."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from checking_worker import CheckingWorker, token_at
from hypothesis import given
from hypothesis import strategies as st
from scheduler_stack import (
    ABORTED,
    CANCELLED,
    NOT_FOUND,
    Gateway,
    Received,
    Stack,
    info_of,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import operations_pb2, operations_pb2_grpc, scheduler_pb2
from scheduler_svc.cluster.balance import moves, moves_without_workers
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.core.request import seed_of_choice
from scheduler_svc.engine import moves as engine_moves
from scheduler_svc.store.errors import NoReply
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.store import Store

LOADS = st.builds(
    ShardLoad,
    leader=st.sampled_from(["", "a"]),
    num_workers=st.integers(0, 2),
    num_free_rows=st.integers(0, 9),
    num_live=st.just(0),
    num_waiting=st.sampled_from([0, 0, 3, 20]),
)


@pytest.fixture
def lasting_keys(lasting_keys: list[str]) -> list[str]:
    """A request that still waits at the end of a test may be given to a shard that has just ended:
    its next leader finds it in the inbox."""
    return [*lasting_keys, "quire:{shard:*}:inbox"]


@given(st.lists(LOADS, min_size=1, max_size=5), st.data())
def test_shards_with_queues_share_the_free_rows_of_others(loads, data) -> None:
    given_by = [moves(shard, load.num_waiting, loads) for shard, load in enumerate(loads)]
    for shard, planned in enumerate(given_by):
        assert sum(planned.values()) <= loads[shard].num_waiting
        for target in planned:
            assert target != shard
            assert loads[target].leader
            assert loads[target].num_workers
            assert not loads[target].num_waiting
    num_queues = sum(bool(load.num_waiting) for load in loads)
    for target, load in enumerate(loads):
        # At least one from each queue, so that few free rows are used at all.
        most = load.num_free_rows + num_queues
        assert sum(planned.get(target, 0) for planned in given_by) <= most


def test_rows_are_divided_in_proportion() -> None:
    idle, busy = ShardLoad("a", 1, 8, 0, 0), ShardLoad("b", 1, 0, 9, 3)
    assert moves(1, 3, [idle, busy]) == {0: 3}
    busier = ShardLoad("c", 1, 0, 20, 9)
    assert moves(1, 3, [idle, busy, busier]) == {0: 2}
    assert moves(2, 9, [idle, busy, busier]) == {0: 6}
    assert moves(0, 0, [idle, busy]) == {}


def test_a_shard_without_workers_divides_its_requests() -> None:
    alone, absent = ShardLoad("a", 0, 0, 7, 7), ShardLoad("", 1, 9)
    busy, busier = ShardLoad("b", 1, 0, 9, 3), ShardLoad("c", 2, 0, 20, 9)
    assert moves_without_workers(0, 7, [alone, absent, busier, busy]) == {3: 4, 2: 3}
    assert moves_without_workers(0, 1, [alone, absent, busier, busy]) == {3: 1}
    assert moves_without_workers(0, 7, [alone, absent]) == {}


@dataclass
class TwoShards:
    """Shards with a worker each, led by one scheduler, and a gateway's stream to each."""

    stack: Stack
    workers: list[CheckingWorker]
    first: Gateway
    second: Gateway


@pytest.fixture
async def shards(redis_url: str, sockets: Path, redis_client) -> AsyncIterator[TwoShards]:
    """The worker of shard 0 is held back."""
    workers = {
        f"w{number}": CheckingWorker(number, num_blocks=128, block_size=4, max_model_len=128)
        for number in (1, 2)
    }
    async with running_stack(redis_url, sockets, workers, max_num_seqs=2) as stack:
        operations = operations_pb2_grpc.OperationsServiceStub(stack.channel)
        await operations.SetNumShards(operations_pb2.SetNumShardsRequest(num_shards=2))
        async with asyncio.timeout(10):
            while True:
                seen = await operations.GetCluster(operations_pb2.GetClusterRequest())
                if len(seen.shards) == 2 and all(shard.num_workers for shard in seen.shards):
                    break
                await asyncio.sleep(0.05)
        by_address = {f"unix:{sockets}/{name}.sock": worker for name, worker in workers.items()}
        placed = [by_address[shard.workers[0]] for shard in seen.shards]
        gateways = [Gateway(stack.channel, shard) for shard in (0, 1)]
        stack.gateways += gateways
        for gateway in gateways:
            await gateway.start()
        placed[0].gate.clear()
        yield TwoShards(stack, placed, *gateways)
        placed[0].gate.set()
        await until(lambda: not redis_client.exists(ShardKeys(1).inbox), "an empty inbox")


async def test_waiting_requests_move_and_end_elsewhere(shards: TwoShards) -> None:
    first, second = shards.first, shards.second
    for number in range(8):
        await first.submit(prompt(9, number), 6, seed=number, has_client_id=True)
    # Two have rows, and two wait for those.
    await until(lambda: sum(x.failure is not None for x in first.received.values()) >= 4, "moves")
    moved = [x for x in first.received.values() if x.failure is not None]
    for received in moved:
        assert received.failure.code == ABORTED
        assert info_of(received.failure).reason == "OTHER_SHARD"
        assert info_of(received.failure).metadata["shard"] == "1"
        received.failure, received.attachment_generation = None, None
        await second.submit_again(received)
    for received in await second.wait_ended():
        assert received.is_whole
    # Their ids are those of the other shard now.
    await first.submit(prompt(9), 6, request_id=moved[0].submission.request_id, has_client_id=True)
    last = max(first.received)
    await until(lambda: first.received[last].failure is not None, "the refusal")
    assert info_of(first.received[last].failure).metadata["shard"] == "1"
    shards.workers[0].gate.set()
    others = [x for x in first.received.values() if x not in moved]
    await until(lambda: all(x.is_ended for x in others), "the ends")
    # Two had rows. Those that waited for these may have moved, too.
    stayed = [x for x in others if x.failure is None]
    assert len(stayed) >= 2
    assert all(x.is_whole for x in stayed)


@pytest.mark.slow
async def test_a_request_without_a_client_moves_too(shards: TwoShards, redis_client) -> None:
    first, second = shards.first, shards.second
    for number in range(8):
        await first.submit(
            prompt(9, number), 6, seed=number, request_id=f"r{number}", resume_window_s=60
        )
    await until(lambda: all(x.accepted for x in first.received.values()), "acceptances")
    for attachment in first.received:
        await first.detach(attachment, client_gone=True)
    keys = [ShardKeys(1).request("", f"r{number}")[0] for number in range(8)]
    await until(lambda: sum(redis_client.exists(key) for key in keys) >= 4, "moves")
    found = next(number for number, key in enumerate(keys) if redis_client.exists(key))
    attachment = await second.attach(first.received[found + 1])
    await second.wait_ended(attachment)
    assert second.received[attachment].is_whole
    await until(lambda: not redis_client.exists(ShardKeys(1).inbox), "an empty inbox")
    # The first shard does not have it any more.
    gone = await first.attach(first.received[found + 1])
    await until(lambda: first.received[gone].failure is not None, "the refusal")
    assert first.received[gone].failure.code == NOT_FOUND


async def test_a_gateway_that_follows_late_takes_no_stream_of_another(shards: TwoShards) -> None:
    """It may have been stopped while the request moved and the client continued elsewhere."""
    shards.workers[1].gate.clear()
    received, again = await moved_once(shards)
    another = Gateway(shards.stack.channel, 1)
    shards.stack.gateways.append(another)
    await another.start()
    resumed = await another.attach(received)
    await until(lambda: another.received[resumed].accepted, "the client's stream")
    late = await shards.second.submit_again(again)
    await until(lambda: shards.second.received[late].failure is not None, "the refusal")
    assert info_of(shards.second.received[late].failure).reason == "TAKEN_OVER"
    shards.workers[1].gate.set()
    [whole] = await another.wait_ended(resumed)
    assert whole.is_whole


async def test_a_client_that_continues_elsewhere_takes_a_stream_that_moved(
    shards: TwoShards,
) -> None:
    shards.workers[1].gate.clear()
    received, again = await moved_once(shards)
    followed = await shards.second.submit_again(again)
    await until(lambda: shards.second.received[followed].accepted, "the stream that followed")
    assert shards.second.received[followed].attachment_generation.is_of_former_shard
    another = Gateway(shards.stack.channel, 1)
    shards.stack.gateways.append(another)
    await another.start()
    resumed = await another.attach(received)
    await until(lambda: shards.second.received[followed].failure is not None, "the take-over")
    assert info_of(shards.second.received[followed].failure).reason == "TAKEN_OVER"
    # It returns with its generation, as after a lost connection.
    late = await shards.second.attach_again(again)
    await until(lambda: shards.second.received[late].failure is not None, "the refusal")
    shards.workers[1].gate.set()
    [whole] = await another.wait_ended(resumed)
    assert whole.is_whole


async def moved_once(shards: TwoShards) -> tuple[Received, Received]:
    """A request that moved to the second shard, as its client knows it, and as its gateway
    does."""
    first = shards.first
    for number in range(8):
        await first.submit(prompt(9, number), 6, seed=number)
    await until(lambda: any(x.failure is not None for x in first.received.values()), "a move")
    received = next(x for x in first.received.values() if x.failure is not None)
    assert received.attachment_generation is not None
    again = replace(received, failure=None)
    again.attachment_generation = scheduler_pb2.AttachmentGeneration()
    again.attachment_generation.CopyFrom(received.attachment_generation)
    again.attachment_generation.is_of_former_shard = True
    return received, again


@pytest.mark.slow
async def test_an_unreadable_entry_ends_no_leader(shards: TwoShards, redis_client) -> None:
    inbox = ShardKeys(1).inbox
    redis_client.rpush(inbox, b"", b"+", b"+nonsense", b"?" * 40)
    await until(lambda: not redis_client.exists(inbox), "an empty inbox")
    attachment = await shards.second.submit(prompt(9), 4)
    [received] = await shards.second.wait_ended(attachment)
    assert received.is_whole


async def test_a_cancelled_request_stays_cancelled(shards: TwoShards) -> None:
    first = shards.first
    for number in range(8):
        await first.submit(prompt(9, number), 6, seed=number)
        await first.cancel(number + 1)
    shards.workers[0].gate.set()
    await until(lambda: all(x.failure for x in first.received.values()), "the ends")
    await until(lambda: not shards.stack.engine.live, "no live request")


async def test_a_request_that_is_being_given_can_be_cancelled(
    shards: TwoShards, monkeypatch
) -> None:
    """Another gateway names its id."""
    put_in_inbox, is_giving, may_give = Store.put_in_inbox, asyncio.Event(), asyncio.Event()

    async def put_late(store: Store, packed: list[bytes]) -> None:
        is_giving.set()
        await may_give.wait()
        await put_in_inbox(store, packed)

    monkeypatch.setattr(Store, "put_in_inbox", put_late)
    shards.workers[1].gate.clear()
    first, second = shards.first, shards.second
    for number in range(8):
        await first.submit(prompt(9, number), 6, seed=number)
    async with asyncio.timeout(10):
        await is_giving.wait()
    term = shards.stack.member.term
    key = next(iter(term.participation._moves.giving))
    target = scheduler_pb2.RequestKey(request_id=key.request_id)
    await first.send(cancellations=[scheduler_pb2.Cancellation(request=target, tag=7)])
    await until(lambda: 7 in first.cancelled, "the result")
    assert first.cancelled[7]
    may_give.set()
    [received] = [x for x in first.received.values() if x.submission.request_id == key.request_id]
    await until(lambda: received.failure is not None, "the move")
    assert info_of(received.failure).metadata["shard"] == "1"
    received.failure = received.attachment_generation = None
    again = second.received[await second.submit_again(received)]
    await until(lambda: again.failure is not None, "the end")
    assert again.failure.code == CANCELLED
    shards.workers[1].gate.set()


async def test_a_request_that_may_have_been_given_is_computed_once(
    shards: TwoShards, monkeypatch
) -> None:
    put_in_inbox, errors = Store.put_in_inbox, [NoReply("late"), NoReply("late")]

    async def put_without_reply(store: Store, packed: list[bytes]) -> None:
        await put_in_inbox(store, packed)
        if packed and errors:
            # From now on there are rows here for all that wait.
            shards.workers[0].gate.set()
            raise errors.pop()

    monkeypatch.setattr(Store, "put_in_inbox", put_without_reply)
    first, second = shards.first, shards.second
    sent = [
        first.received[await first.submit(prompt(9, number), 6, seed=number)] for number in range(8)
    ]
    await until(lambda: all(one.is_ended for one in sent), "ends and moves")
    assert not errors
    moved = [one for one in sent if one.failure is not None]
    assert moved
    for received in moved:
        received.failure = received.attachment_generation = None
        await second.submit_again(received)
    assert all(received.is_whole for received in await second.wait_ended())
    assert sum(worker.num_sampled_tokens for worker in shards.workers) == 8 * 6


async def test_a_request_moves_with_its_output_when_its_worker_is_lost(shards: TwoShards) -> None:
    first, second = shards.first, shards.second
    shards.workers[0].gate.set()
    attachment = await first.submit(prompt(9), 80, seed=3)
    received = first.received[attachment]
    await until(lambda: len(received.token_ids) > 20, "tokens")
    name = next(name for name, (one, _) in shards.stack.workers.items() if one is shards.workers[0])
    await shards.stack.stop_worker(name)
    await until(lambda: received.failure is not None, "the move")
    assert info_of(received.failure).metadata["shard"] == "1"
    num_steps = len(shards.workers[1].plans)
    received.failure = received.attachment_generation = None
    await second.submit_again(received)
    [again] = await second.wait_ended()
    assert again.is_whole
    # What it had was computed in few steps, not token by token.
    assert len(shards.workers[1].plans) - num_steps < 75


async def test_requests_of_a_shard_without_workers_join_the_queue_of_another(
    shards: TwoShards, monkeypatch
) -> None:
    monkeypatch.setattr(engine_moves, "STRANDED_S", 0.5)
    first, second = shards.first, shards.second
    shards.workers[1].gate.clear()
    lost = [second.received[await second.submit(prompt(9), 6, seed=seed)] for seed in range(2)]
    await until(lambda: shards.workers[1].is_held_back, "a step that is held back")
    for number in range(8):
        await first.submit(prompt(9, number), 6, seed=number, request_id=f"first-{number}")
    await until(lambda: shards.stack.engine.waiting, "a queue here")
    name = next(name for name, (one, _) in shards.stack.workers.items() if one is shards.workers[1])
    await shards.stack.stop_worker(name)
    await until(lambda: all(received.failure for received in lost), "the moves")
    for received in lost:
        assert info_of(received.failure).metadata["shard"] == "0"
        received.failure = received.attachment_generation = None
        await first.submit_again(received)
    shards.workers[0].gate.set()
    for received in await first.wait_ended():
        assert received.is_whole


async def test_a_request_moves_when_one_of_its_choices_has_ended(shards: TwoShards) -> None:
    first, second = shards.first, shards.second
    shards.workers[0].gate.set()
    # Choice 0 samples the token soon, choice 1 never.
    seed, stop = next(
        (seed, token)
        for seed in range(1, 100)
        for token in [token_at(seed_of_choice(seed, 0), 9 + 3)]
        if token not in [token_at(seed_of_choice(seed, 1), 9 + index) for index in range(80)]
    )
    attachment = await first.submit(prompt(9), 80, seed=seed, n=2, stop_token_ids=(stop,))
    received = first.received[attachment]
    ended, running = received.choices
    await until(lambda: ended.end is not None and len(running.token_ids) > 20, "the end of one")
    name = next(name for name, (one, _) in shards.stack.workers.items() if one is shards.workers[0])
    await shards.stack.stop_worker(name)
    await until(lambda: received.failure is not None, "the move")
    assert info_of(received.failure).metadata["shard"] == "1"
    received.failure = received.attachment_generation = None
    await second.submit_again(received)
    [again] = await second.wait_ended()
    assert again.is_whole
    assert len(again.choices[1].token_ids) == 80


async def test_a_request_with_output_stays_if_the_other_shard_serves_another_model(
    shards: TwoShards, redis_client, monkeypatch
) -> None:
    first, num_asked, model = shards.first, 0, Store.model

    async def count(store: Store) -> bytes:
        nonlocal num_asked
        num_asked += 1
        return await model(store)

    monkeypatch.setattr(Store, "model", count)
    redis_client.hset(ShardKeys(1).leadership, "model", b"other model")
    worker = shards.workers[0]
    worker.gate.set()
    received = first.received[await first.submit(prompt(9), 80, seed=3)]
    await until(lambda: len(received.token_ids) > 20, "tokens")
    name = next(name for name, (one, _) in shards.stack.workers.items() if one is worker)
    await shards.stack.stop_worker(name)
    # The second time the first attempt is over.
    await until(lambda: num_asked >= 2, "attempts to move it")
    await shards.stack.start_worker(name, worker)
    await first.wait_ended()
    assert received.is_whole
