"""How a shard claims the ids of its requests: before there are others, at once, and for as long as
they live."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
from scripted_cluster import ScriptedCluster, beat
from waiting import until

from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.engine import claims as claims_module
from scheduler_svc.engine.claims import Claims
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.id_directory import Claim
from scheduler_svc.store.requests import RequestKey

A, B = RequestKey("", "a"), RequestKey("tenant", "b")
TTL_S = 600


class Directory:
    """The ids that any shard has, and the records of this one."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[RequestKey], int, int, Claim]] = []
        self.shards: dict[RequestKey, int] = {}
        self.num_failures = 0
        self.has_scanned = False

    async def claim(self, ids: Sequence[RequestKey], shard: int, ttl_s: int, which: Claim):
        self.calls.append(([*ids], shard, ttl_s, which))
        if self.num_failures:
            self.num_failures -= 1
            raise StoreUnavailable("no connection")
        return [self.shards.get(key) for key in ids]

    async def stored_requests(self) -> list[RequestKey]:
        self.has_scanned = True
        return [A, B]


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def member() -> Membership:
    return ScriptedCluster().member("a")


def claims(directory: Directory, member: Membership, live: dict) -> Claims:
    return Claims(directory, directory, 2, member, live, TTL_S)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running(mine: Claims) -> AsyncIterator[None]:
    task = asyncio.create_task(mine.run())
    await asyncio.sleep(0)
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_single_shard_claims_nothing(directory, member) -> None:
    mine = claims(directory, member, {})
    async with running(mine):
        assert mine.is_needed, "an earlier leader may have just added shards"
        await beat(member)
        await until(lambda: not mine.is_needed, "the map")
        member.set_map(ClusterMap(1, 2), member.now_ms)
        assert mine.is_needed


async def test_a_reading_that_began_before_the_term_proves_nothing(directory, member) -> None:
    reading = await member._beat("a")
    mine = claims(directory, member, {})
    async with running(mine):
        member._take(reading)
        await asyncio.sleep(0)
        assert mine.is_needed
        await beat(member)
        await until(lambda: not mine.is_needed, "the map")


async def test_requests_that_are_being_recorded_are_claimed_with_the_others(
    directory, member
) -> None:
    mine = claims(directory, member, {})
    with mine.recording():
        claiming = asyncio.create_task(mine.claim_all())
        await asyncio.sleep(0)
        assert mine.is_needed
        with mine.recording():
            # It claims its ids itself.
            pass
        await asyncio.sleep(0)
        assert not directory.has_scanned
    await claiming
    assert directory.has_scanned
    assert len(directory.calls) == 1


async def test_before_others_begin_all_requests_are_claimed(directory, member) -> None:
    mine = claims(directory, member, {})
    async with running(mine):
        await beat(member)
        await until(lambda: not mine.is_needed, "the map")
        await mine.claim_all()
        [(keys, shard, ttl_s, which)] = directory.calls
        assert (keys, shard, which) == ([A, B], 2, Claim.ALL)
        assert ttl_s > TTL_S, "a claim outlives the record"
        assert mine.is_needed, "also of those that come before the others are known"


async def test_before_more_begin_the_ids_of_others_stay_theirs(directory, member) -> None:
    member.set_map(ClusterMap(1, 2), member.now_ms)
    await claims(directory, member, {}).claim_all()
    [(keys, shard, _, which)] = directory.calls
    assert (keys, shard, which) == ([A, B], 2, Claim.NEW)


async def test_an_id_of_another_shard_is_reported(directory, member) -> None:
    directory.shards = {B: 7}
    assert await claims(directory, member, {}).claim([A, B]) == [2, 7]


async def test_a_request_that_moves_takes_its_claim_along(directory, member) -> None:
    await claims(directory, member, {}).give([A], 5)
    [(keys, shard, _, which)] = directory.calls
    assert (keys, shard, which) == ([A], 5, Claim.KNOWN)


async def test_claims_of_live_requests_are_renewed(directory, member, monkeypatch) -> None:
    monkeypatch.setattr(claims_module, "_RENEWAL_S", 0.001)
    monkeypatch.setattr(claims_module, "_RETRY_S", 0.001)
    live: dict = {}
    directory.num_failures = 1
    async with running(claims(directory, member, live)):
        await beat(member)
        live[A] = None
        member.set_map(ClusterMap(1, 2), member.now_ms)
        await until(lambda: len(directory.calls) > 2, "renewals, also after a failure")
        assert all(keys == [A] and which is Claim.NEW for keys, _, _, which in directory.calls)


async def test_a_new_leader_claims_what_redis_may_have_lost(directory, member, monkeypatch) -> None:
    monkeypatch.setattr(claims_module, "_RETRY_S", 0.001)
    member.set_map(ClusterMap(1, 2), member.now_ms)
    directory.num_failures = 1
    async with running(claims(directory, member, {A: None, B: None})):
        await beat(member)
        await until(lambda: len(directory.calls) == 2, "the claims, again after a failure")
        assert directory.calls[1][0] == [A, B]
