"""Several shards, led by schedulers in one process, with a worker each."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import redis
from checking_worker import CheckingWorker
from scheduler_stack import (
    ABORTED,
    Gateway,
    Member,
    Received,
    Stack,
    check_outputs,
    info_of,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import operations_pb2, operations_pb2_grpc, scheduler_pb2
from scheduler_svc import shard as shard_module
from scheduler_svc.cluster import coordinator, hand_overs
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.engine.claims import Claims
from scheduler_svc.engine.tenant_exchange import TenantExchange
from scheduler_svc.participation import Participation
from scheduler_svc.store.cluster import ClusterStore
from scheduler_svc.store.errors import LeadershipLost, StoreUnavailable
from scheduler_svc.store.keys import ClusterKeys
from scheduler_svc.store.store import Store

NUM_SHARDS = 4


def worker(number: int) -> CheckingWorker:
    return CheckingWorker(incarnation=number, num_blocks=128, block_size=4, max_model_len=256)


@pytest.fixture
async def stack(
    redis_url: str, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    """Four workers and, at first, one scheduler and one shard."""
    monkeypatch.setattr(coordinator, "JOIN_S", 0.1)
    workers = {f"w{number}": worker(number) for number in range(1, NUM_SHARDS + 1)}
    async with running_stack(redis_url, sockets, workers, lease_s=1.5) as stack:
        yield stack


def operations(member: Member) -> operations_pb2_grpc.OperationsServiceStub:
    return operations_pb2_grpc.OperationsServiceStub(member.channel)


async def set_num_shards(member: Member, number: int = NUM_SHARDS) -> None:
    await operations(member).SetNumShards(operations_pb2.SetNumShardsRequest(num_shards=number))


async def cluster(member: Member) -> operations_pb2.GetClusterResponse:
    return await operations(member).GetCluster(operations_pb2.GetClusterRequest())


async def leaders(stack: Stack, members: int, num_shards: int = NUM_SHARDS) -> list[str]:
    """The leader of each shard, once every shard has one and a worker, and they are even."""
    while True:
        await asyncio.sleep(0.05)
        try:
            seen = await cluster(stack.member)
        except grpc.aio.AioRpcError:
            # It has just started.
            continue
        found = [shard.leader for shard in seen.shards]
        even = [found.count(address) for address in {*found} - {""}]
        if (
            len(found) == num_shards
            and "" not in found
            and all(shard.num_workers for shard in seen.shards)
            and len(even) == members
            and max(even) - min(even) <= 1
            # A leader may be in the course of handing over.
            and all(
                member.scheduler.shards[shard].term is not None
                for shard, address in enumerate(found)
                for member in stack.members
                if member.address == address
            )
        ):
            return found


async def connect(stack: Stack, address: str, shard: int) -> Gateway:
    """A gateway's stream for a shard."""
    member = next(member for member in stack.members if member.address == address)
    gateway = Gateway(member.channel, shard)
    stack.gateways.append(gateway)
    await gateway.start()
    return gateway


async def connect_all(stack: Stack, found: list[str]) -> list[Gateway]:
    gateways = [await connect(stack, address, shard) for shard, address in enumerate(found)]
    await until(lambda: all(gateway.hello for gateway in gateways), "the hellos")
    return gateways


async def test_shards_and_workers_are_spread_and_every_shard_serves(stack: Stack) -> None:
    first = stack.member
    stack.start_scheduler()
    await set_num_shards(first)
    async with asyncio.timeout(10):
        found = await leaders(stack, members=2)
    gateways = await connect_all(stack, found)
    for shard, gateway in enumerate(gateways):
        for seed in range(3):
            await gateway.submit(prompt(10, shard), 6, seed)
    for gateway in gateways:
        await check_outputs(gateway)
    assert all(checking.num_streams for checking, _ in stack.workers.values())
    await until(
        lambda: [state.leader for state in gateways[0].cluster.shards] == found,
        "the leaders of all shards",
    )
    # The leader of another shard is named.
    other = await connect(stack, next(a for a in found if a != found[0]), 0)
    await until(lambda: other.lost is not None, "the refusal")
    assert other.lost.code() is grpc.StatusCode.UNAVAILABLE
    assert info_of(other.lost).metadata == {"leader": found[0], "num_shards": str(NUM_SHARDS)}


@pytest.mark.slow
async def test_the_shards_of_a_dead_scheduler_go_to_the_others_and_back(stack: Stack) -> None:
    first = stack.member
    stack.start_scheduler()
    await set_num_shards(first)
    async with asyncio.timeout(10):
        found = await leaders(stack, members=2)
    gateways = await connect_all(stack, found)
    for shard, gateway in enumerate(gateways):
        await gateway.submit(prompt(10, shard), 200, seed=shard)
    await until(lambda: all(len(g.received[1].token_ids) > 2 for g in gateways), "tokens")
    await first.kill()
    async with asyncio.timeout(10):
        again = await leaders(stack, members=1)
    for shard, gateway in enumerate(gateways):
        if found[shard] == first.address:
            await gateway.close()
            following = await connect(stack, again[shard], shard)
            await following.submit_again(gateway.received[1])
            stack.gateways.remove(gateway)
            await check_outputs(following)
        else:
            await check_outputs(gateway)
    # Its successor gets shards back.
    survivor = stack.member
    stack.start_scheduler()
    async with asyncio.timeout(10):
        last = await leaders(stack, members=2)
    assert {last[shard] for shard in range(NUM_SHARDS)} == {
        survivor.address,
        stack.member.address,
    }


@pytest.mark.slow
async def test_a_scheduler_that_joins_gets_one_shard_after_another_and_is_named(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways find it without a search, and without a second attempt."""
    load, update, num_decisions = Participation.load, coordinator.Coordinator._update, 0

    def busy(self: Participation) -> ShardLoad | None:
        known = load(self)
        return known and replace(known, num_live=1)

    async def counted(*args: object, **options: object) -> None:
        nonlocal num_decisions
        await update(*args, **options)
        num_decisions += 1

    # Idle shards are given together.
    monkeypatch.setattr(Participation, "load", busy)
    monkeypatch.setattr(coordinator.Coordinator, "_update", counted)
    # However slow this machine is.
    monkeypatch.setattr(shard_module, "HANDLER_WITHIN_S", 10.0)
    monkeypatch.setattr(hand_overs, "MAX_HAND_OVER_S", 3600)
    await set_num_shards(stack.member)
    async with asyncio.timeout(10):
        found = await leaders(stack, members=1)
    left = dict(enumerate(await connect_all(stack, found)))
    membership = stack.member.scheduler._process.membership
    second = stack.start_scheduler()
    for number in range(1, NUM_SHARDS // 2 + 1):
        await until(lambda: any(gateway.lost for gateway in left.values()), "a hand-over")
        [shard] = [given for given, gateway in left.items() if gateway.lost]
        await until(lambda at=shard: membership.loads[at].leader == second.address, "the load")
        # The first of them may have begun before.
        enough = num_decisions + 3
        await until(lambda at=enough: num_decisions >= at, "decisions")
        owners = list(membership.map.owners.values())
        assert owners.count(second.scheduler._process.membership.id) == number
        assert [given for given, gateway in left.items() if gateway.lost] == [shard]
        lost = left.pop(shard).lost
        assert (info_of(lost).reason, info_of(lost).metadata["leader"]) == (
            "LEAD_ENDS",
            second.address,
        )
        following = await connect(stack, second.address, shard)
        await until(lambda at=following: at.hello or at.lost, "the hello")
        assert following.lost is None
    async with asyncio.timeout(10):
        await leaders(stack, members=2)
    assert not any(gateway.lost for gateway in left.values())


async def test_the_number_of_shards_is_raised_while_requests_run(stack: Stack) -> None:
    gateway = await stack.gateway()
    for seed in range(12):
        await gateway.submit(prompt(12, seed), 60, seed)
    await until(lambda: sum(len(one.token_ids) for one in gateway.received.values()) > 30, "tokens")
    await set_num_shards(stack.member)
    for seed in range(12, 16):
        await gateway.submit(prompt(12, seed), 6, seed)
    async with asyncio.timeout(20):
        found = await leaders(stack, members=1)
    assert found == [stack.member.address] * NUM_SHARDS
    gateways = await connect_all(stack, found)
    await gateway.wait_ended()
    for received in gateway.received.values():
        if received.failure is not None:
            # It waited, and another shard had room.
            assert info_of(received.failure).reason == "OTHER_SHARD"
            shard = int(info_of(received.failure).metadata["shard"])
            received.failure = received.attachment_generation = None
            await gateways[shard].submit_again(received)
        else:
            assert received.is_whole
    for other in gateways:
        await check_outputs(other)
    for refused in (2, 5000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await set_num_shards(stack.member, refused)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info_of(caught.value).reason == "NUM_SHARDS_OUT_OF_RANGE"
        assert f"(got {refused})" in (caught.value.details() or "")


@pytest.mark.slow
async def test_no_shard_is_lost_when_the_map_is_lost_while_no_scheduler_runs(
    stack: Stack, redis_client: redis.Redis
) -> None:
    await set_num_shards(stack.member)
    async with asyncio.timeout(10):
        gateways = await connect_all(stack, await leaders(stack, members=1))
    for shard, gateway in enumerate(gateways):
        await gateway.submit(prompt(10, shard), 100, seed=shard)
    await until(lambda: all(len(g.received[1].token_ids) > 2 for g in gateways), "tokens")
    await stack.member.kill()
    redis_client.set(ClusterKeys().map, b"broken")
    stack.start_scheduler()
    async with asyncio.timeout(10):
        found = await leaders(stack, members=1)
    for gateway, following in zip(gateways, await connect_all(stack, found), strict=True):
        stack.gateways.remove(gateway)
        await gateway.close()
        await following.submit_again(gateway.received[1])
        await check_outputs(following)


async def test_a_map_is_refused_if_nothing_shows_the_shards(
    redis_url: str, redis_client: redis.Redis, sockets: Path
) -> None:
    redis_client.set(ClusterKeys().map, b"broken")
    stack = Stack(redis_url, sockets, {"workers": f"unix:{sockets}/none.sock"})
    member = stack.start_scheduler()
    try:
        health = member.scheduler._health
        await until(lambda: ClusterKeys().map in health.failing.get("lead", ""), "the reason")
        assert not member.is_leading
        with pytest.raises(grpc.aio.AioRpcError, match="quire shards"):
            await cluster(member)
        redis_client.delete(ClusterKeys().map)
        await until(lambda: member.is_leading, "a leader")
    finally:
        await stack.stop()


async def test_an_id_belongs_to_one_shard(stack: Stack) -> None:
    gateway = await stack.gateway()
    early = await gateway.submit(prompt(8), 4, request_id="early", has_client_id=True)
    await gateway.wait_ended(early)
    await set_num_shards(stack.member)
    async with asyncio.timeout(10):
        found = await leaders(stack, members=1)
    zero, one, *_ = await connect_all(stack, found)
    # That of a request from before, and of a new one.
    await one.submit(prompt(8), 4, request_id="early", has_client_id=True)
    new = await zero.submit(prompt(8, 1), 4, request_id="new", has_client_id=True)
    await zero.wait_ended(new)
    await one.submit(prompt(8, 2), 4, request_id="new", has_client_id=True)
    await until(lambda: all(x.failure for x in one.received.values()), "the refusals")
    for received in one.received.values():
        assert received.failure.code == ABORTED
        assert info_of(received.failure).reason == "OTHER_SHARD"
        assert info_of(received.failure).metadata["shard"] == "0"
    # Ids of gateways are unique: nothing is asked.
    free = await one.submit(prompt(8, 2), 4, request_id="new")
    await one.wait_ended(free)
    assert one.received[free].is_whole


async def test_an_id_that_is_recorded_while_shards_are_added_belongs_to_one_shard(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is slow: the scan of the records could miss it."""
    gateway = await stack.gateway()
    store = stack.scheduler.shards[0]._store
    record, is_recorded = store.record, asyncio.Event()

    async def record_late(*args: object) -> object:
        await is_recorded.wait()
        return await record(*args)

    await until(lambda: not is_claiming(stack), "the map")
    monkeypatch.setattr(store, "record", record_late)
    slow = await gateway.submit(prompt(8), 4, request_id="slow", has_client_id=True)
    await until(lambda: gateway_claims(stack)._recordings, "the submission")
    raising = asyncio.create_task(set_num_shards(stack.member))
    await until(lambda: is_claiming(stack), "the beginning")
    is_recorded.set()
    await raising
    async with asyncio.timeout(10):
        found = await leaders(stack, members=1)
    await gateway.wait_ended(slow)
    one = (await connect_all(stack, found))[1]
    again = await one.submit(prompt(8), 4, request_id="slow", has_client_id=True)
    await until(lambda: one.received[again].failure is not None, "the refusal")
    assert info_of(one.received[again].failure).metadata["shard"] == "0"


def gateway_claims(stack: Stack) -> Claims:
    return stack.member.term.handler._submissions._claims


def is_claiming(stack: Stack) -> bool:
    return gateway_claims(stack).is_needed


LIMITED = scheduler_pb2.TenantPolicy(live_requests=5)


async def submit_limited(gateway: Gateway, number: int, max_tokens: int = 4) -> Received:
    attachment = await gateway.submit(
        prompt(8, number),
        max_tokens,
        seed=number,
        request_id=f"{gateway._shard}-{number}",
        principal="t",
        tenant=LIMITED,
    )
    return gateway.received[attachment]


def is_decided(received: Received) -> bool:
    return received.accepted or received.failure is not None


async def accepted_of(
    gateways: list[Gateway], shards: list[int], numbers: Sequence[int]
) -> list[Received]:
    """Submit a tenant's requests at once, refused ones again to the shards that are named; return
    those that were accepted."""
    sent = [
        await submit_limited(gateways[shard], number)
        for shard, number in zip(shards, numbers, strict=True)
    ]
    await until(lambda: all(map(is_decided, sent)), "decisions")
    for received in [one for one in sent if one.failure is not None]:
        info = info_of(received.failure)
        assert info.reason == "LIVE_REQUESTS"
        if "shard" in info.metadata:
            other = gateways[int(info.metadata["shard"])]
            sent.append(await submit_limited(other, 100 + received.seed))
    await until(lambda: all(map(is_decided, sent)), "decisions")
    return [one for one in sent if one.accepted]


async def test_a_tenant_has_its_limit_over_all_shards_together(stack: Stack) -> None:
    """Requests to all shards at once: each is refused once before it is refused for good. The
    shards of two schedulers learn of each other by Redis alone."""
    first = stack.member
    stack.start_scheduler()
    await set_num_shards(first)
    async with asyncio.timeout(10):
        found = await leaders(stack, members=2)
    gateways = await connect_all(stack, found)
    for checking, _ in stack.workers.values():
        checking.gate.clear()
    accepted = await accepted_of(gateways, [n % NUM_SHARDS for n in range(12)], range(12))
    assert len(accepted) == 5
    shards = [shard for member in stack.members for shard in member.scheduler.shards.values()]
    terms = [shard.term for shard in shards if shard.term is not None]
    assert sum(term.engine.quotas.num_live("t") for term in terms) == 5
    for checking, _ in stack.workers.values():
        checking.gate.set()
    # As soon as they have ended, the limit can be used again, whichever shard is asked first.
    await until(lambda: all(one.is_ended for one in accepted), "their ends")
    assert len(await accepted_of(gateways, [3] * 5, range(20, 25))) == 5


@pytest.mark.parametrize(("owner", "name"), [(ClusterStore, "exchange"), (Store, "write_map")])
async def test_a_tenant_keeps_its_limit_if_no_shards_can_be_added(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    async def fail(*args: object) -> None:
        raise StoreUnavailable("no connection")

    gateway = await stack.gateway()
    await submit_limited(gateway, 0)
    await gateway.wait_ended()
    with monkeypatch.context() as failing:
        failing.setattr(owner, name, fail)
        with pytest.raises(grpc.aio.AioRpcError, match="the number is not changed"):
            await set_num_shards(stack.member)
    assert not stack.engine.quotas.has_others
    sent = [await submit_limited(gateway, number) for number in range(1, 6)]
    await until(lambda: all(map(is_decided, sent)), "decisions")
    assert all(received.accepted for received in sent)


@pytest.mark.parametrize("by_id", [False, True], ids=["by its gateway", "by its id"])
async def test_a_request_that_waits_for_room_can_be_cancelled(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, by_id: bool
) -> None:
    ask, num_waiting, have_both_come = TenantExchange.ask, 0, asyncio.Event()

    async def ask_when_both_have_come(self: TenantExchange, within_s: float = 0.0) -> bool:
        nonlocal num_waiting
        num_waiting += not within_s
        if num_waiting == 2:
            have_both_come.set()
        await have_both_come.wait()
        return await ask(self, within_s)

    monkeypatch.setattr(TenantExchange, "ask", ask_when_both_have_come)
    have_both_come.set()
    await set_num_shards(stack.member)
    async with asyncio.timeout(10):
        found = await leaders(stack, members=1)
    zero, one, *_ = await connect_all(stack, found)
    for checking, _ in stack.workers.values():
        checking.gate.clear()
    held = [await submit_limited(zero, number) for number in range(5)]
    await until(lambda: all(received.accepted for received in held), "the limit")
    num_waiting = 0
    have_both_come.clear()
    late = await submit_limited(one, 5)
    term = stack.scheduler.shards[1].term
    if by_id:
        submitted = late.submission
        key = scheduler_pb2.RequestKey(
            principal=submitted.principal, request_id=submitted.request_id
        )
        await one.send(cancellations=[scheduler_pb2.Cancellation(request=key, tag=1)])
        await until(lambda: bool(one.cancelled), "the result")
        assert one.cancelled == {1: True}
    else:
        await one.cancel(late.submission.attachment)
    last = await submit_limited(one, 6)
    await until(lambda: last.failure is not None, "the refusal")
    if by_id:
        assert late.failure is not None
        assert info_of(late.failure).reason == "CANCELLED"
    else:
        assert not is_decided(late)
    assert not term.engine.live
    for checking, _ in stack.workers.values():
        checking.gate.set()


async def test_requests_are_looked_up_by_their_ids(stack: Stack) -> None:
    gateway = await stack.gateway()
    await gateway.submit(prompt(8), 4, request_id="ended")
    await gateway.wait_ended()
    await gateway.submit(prompt(8), 500, request_id="live")
    names = ["ended", "live", "none"]
    lookups = [
        scheduler_pb2.Lookup(tag=tag, request=scheduler_pb2.RequestKey(request_id=name))
        for tag, name in enumerate(names)
    ]
    await until(lambda: gateway.received[2].accepted, "the acceptance")
    await gateway.send(lookups=lookups)
    await until(lambda: len(gateway.found) == 3, "the results")
    assert gateway.found == {0: True, 1: True, 2: False}
    await gateway.cancel(2)


async def test_questions_that_find_leadership_lost_leave_no_traceback(stack: Stack) -> None:
    asked = []

    async def lost() -> None:
        asked.append(True)
        raise LeadershipLost("Redis has none")

    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    gateway = await stack.gateway()
    handler = stack.member.term.handler
    handler._moves = SimpleNamespace(take=lost, giving={})
    key = scheduler_pb2.RequestKey(request_id="none")
    await gateway.send(
        lookups=[scheduler_pb2.Lookup(tag=1, request=key)],
        cancellations=[scheduler_pb2.Cancellation(tag=2, request=key)],
    )
    await until(lambda: len(asked) == 2 and not handler._tasks, "the end of both questions")
    gc.collect()
    assert not unhandled


async def test_a_worker_serves_one_shard_at_a_time(redis_url: str, sockets: Path) -> None:
    """The worker moves when its first shard has closed its lane, though epochs may fall."""
    async with running_stack(redis_url, sockets, {"a": worker(1), "b": worker(2)}) as stack:
        await stack.ready(2)
        await set_num_shards(stack.member, 2)
        async with asyncio.timeout(10):
            await leaders(stack, members=1, num_shards=2)
        seen = await cluster(stack.member)
        assert [len(shard.workers) for shard in seen.shards] == [1, 1]
        assert seen.schedulers == [stack.member.address]
