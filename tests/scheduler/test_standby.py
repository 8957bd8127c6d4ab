"""Which of the standbys takes a lease that is free: its owner at once, others after a while."""

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import redis
from scripted_cluster import ScriptedCluster, beat
from structlog.testing import capture_logs
from waiting import until

from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.leadership import standby as standby_module
from scheduler_svc.leadership.standby import YIELD_S, Standby
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.store import Store

SHARD = 3
KEYS = ShardKeys(SHARD)
LEASE_S = 3.0


@pytest.fixture
def cluster() -> ScriptedCluster:
    """With the time that Redis has."""
    cluster = ScriptedCluster()
    cluster.now_s = time.time()
    return cluster


@pytest.fixture
async def members(cluster: ScriptedCluster) -> list[Membership]:
    """The owner of the shard, and another scheduler."""
    owner, other = cluster.member("unix:/owner"), cluster.member("unix:/other")
    cluster.set_map(ClusterMap(1, 4, {0: other.id, 1: other.id, 2: owner.id, SHARD: owner.id}))
    await beat(owner, other, owner)
    return [owner, other]


@pytest.fixture
async def standbys(redis_url: str, members: list[Membership]) -> AsyncIterator[list[Standby]]:
    """Those of the owner and of the other scheduler."""
    stores = [Store.at(redis_url, shard=SHARD) for _ in members]
    standbys = [
        Standby(store.lease, address, LEASE_S, None, member, SHARD)
        for store, member, address in zip(
            stores, members, ("unix:/owner", "unix:/other"), strict=True
        )
    ]
    yield standbys
    for standby, store in zip(standbys, stores, strict=True):
        standby._watch.stop()
        await store.lease.release()
        await store.close()


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch):
    """Move the clock of the standbys."""
    now = [1000.0]
    monkeypatch.setattr(standby_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


async def test_its_owner_takes_a_free_lease_at_once(standbys, pass_time) -> None:
    owner, other = standbys
    assert await other._try_acquire() is None
    pass_time(YIELD_S / 2)
    assert await other._try_acquire() is None
    assert await owner._try_acquire() is not None
    # It is not free any more; the other one waits for as long when it is again.
    pass_time(YIELD_S)
    assert await other._try_acquire() is None
    await owner._store.release()
    assert await other._try_acquire() is None
    assert await owner._try_acquire() is not None


async def test_another_scheduler_takes_a_lease_that_its_owner_leaves(standbys, pass_time) -> None:
    _, other = standbys
    assert await other._try_acquire() is None
    pass_time(YIELD_S)
    assert await other._try_acquire() is not None


async def test_each_reason_of_an_outage_is_logged_once(standbys, monkeypatch) -> None:
    owner, _ = standbys
    reasons = ["lost", "refused", "lost", "refused"]

    async def fail() -> None:
        raise StoreUnavailable(reasons.pop(0))

    for _ in range(2):
        with capture_logs() as logs, monkeypatch.context() as patch:
            patch.setattr(owner._store, "leader", fail)
            while reasons:
                assert await owner._try_acquire() is None
        assert [line["reason"] for line in logs] == ["lost", "refused"]
        assert owner.redis_error == "refused"
        await owner._try_acquire()
        assert owner.redis_error is None
        reasons += ["lost", "refused", "refused"]


async def test_a_scheduler_that_has_not_read_the_map_waits(
    redis_url: str, redis_client: redis.Redis
) -> None:
    store = Store.at(redis_url, shard=SHARD)
    member = ScriptedCluster().member("unix:/new")
    standby = Standby(store.lease, "unix:/new", LEASE_S, None, member, SHARD)
    assert await standby._try_acquire() is None
    await beat(member)
    # It does not know this shard, so it does not own it.
    assert not member.is_owner(SHARD)
    assert await standby._try_acquire() is None
    member.set_map(ClusterMap(1, 4, {SHARD: member.id}), member.now_ms)
    assert await standby._try_acquire() is not None
    await store.lease.release()
    await store.close()


async def test_an_expired_lease_goes_to_its_owner_first(
    standbys, pass_time, members, redis_client: redis.Redis
) -> None:
    owner, other = standbys
    before = await owner._try_acquire()
    assert before is not None

    def age(seconds: float) -> None:
        redis_client.hincrby(KEYS.leadership, "renewed_ms", -round(seconds * 1000))

    age(LEASE_S)
    assert await other._try_acquire() is None
    age(YIELD_S)
    after = await other._try_acquire()
    assert after is not None
    assert after.epoch > before.epoch
    # The other way round: the owner, which was stopped, and does not wait.
    age(LEASE_S)
    assert await owner._try_acquire() is not None


async def test_the_lease_of_a_process_that_has_ended_goes_to_its_owner_first(
    standbys, pass_time, members
) -> None:
    owner, other = standbys
    leadership = await other._store.acquire("unix:/leader", lease_ms=3000)
    await owner._try_acquire()
    leader = await owner._store.leader()
    assert leadership is not None
    assert leader is not None
    for standby in standbys:
        standby._on_lost(leader, True)
    assert await other._try_acquire() is None
    assert await owner._try_acquire() is not None


@pytest.mark.parametrize("has_ended", [True, False], ids=["ended", "released"])
async def test_the_owner_is_named_while_the_shard_has_no_leader(
    standbys, pass_time, has_ended: bool
) -> None:
    """A gateway that asks another scheduler need not ask all."""
    owner, other = standbys
    assert await other._store.acquire("unix:/leader", lease_ms=3000) is not None
    await other._try_acquire()
    assert other.leader_address == "unix:/leader"
    leader = await other._store.leader()
    assert leader is not None
    if not has_ended:
        await other._store.release()
    for standby in standbys:
        standby._on_lost(leader, has_ended)
    assert other.leader_address == "unix:/owner"
    assert await other._try_acquire() is None
    assert other.leader_address == "unix:/owner"
    assert await owner._try_acquire() is not None


async def test_the_end_of_the_owner_makes_another_one_the_owner(
    standbys, pass_time, members
) -> None:
    owner, other = standbys
    assert await owner._try_acquire() is not None
    assert await other._try_acquire() is None
    leader = await other._store.leader()
    assert leader is not None
    other._on_lost(leader, True)
    assert list(members[1].members.values()) == ["unix:/other"]
    assert await other._try_acquire() is not None, "without a wait"


async def test_a_lease_left_to_an_owner_that_ends_is_acquired_at_once(
    standbys, members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two schedulers that end together, one may be noticed a moment before the other."""
    monkeypatch.setattr(standby_module, "TRY_INTERVAL_S", 60.0)
    _, other = standbys
    acquiring = asyncio.create_task(other.acquire())
    await until(lambda: other._free_since is not None, "an attempt")
    assert not acquiring.done()
    members[1].mark_ended("unix:/owner")
    async with asyncio.timeout(5):
        assert await acquiring is not None


async def test_a_leader_is_lost_to_those_that_do_not_watch_it_yet(
    standbys, cluster, members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has started just now. By another shard it knows that the leader has ended."""
    monkeypatch.setattr(standby_module, "TRY_INTERVAL_S", 60.0)
    owner, other = standbys
    await beat(cluster.member("unix:/leader"), *members)
    assert await other._store.acquire("unix:/leader", lease_ms=3000) is not None
    acquiring = asyncio.create_task(owner.acquire())
    await until(lambda: owner.leader_address == "unix:/leader", "an attempt")
    assert not owner._watch.is_watching
    cluster.now_s = time.time()
    members[0].mark_ended("unix:/leader")
    async with asyncio.timeout(5):
        assert await acquiring is not None


async def test_a_later_process_at_the_address_of_one_that_has_ended_leads(
    standbys, cluster, members
) -> None:
    owner, other = standbys
    cluster.now_s -= 1.0
    await beat(cluster.member("unix:/leader"), *members)
    members[0].mark_ended("unix:/leader")
    assert members[0].has_ended("unix:/leader", cluster.now_ms)
    assert await other._store.acquire("unix:/leader", lease_ms=3000) is not None
    assert await owner._try_acquire() is None


async def test_a_leader_that_ends_after_an_outage_is_not_waited_for(
    standbys, pass_time, redis_client: redis.Redis
) -> None:
    owner, other = standbys
    assert await other._store.acquire("unix:/leader", lease_ms=3000) is not None
    before = await owner._store.leader()
    assert before is not None
    assert await owner._try_acquire() is None
    # It ended before or during the outage: another one may have led since, and Redis lost it.
    owner._on_lost(before, True)
    owner._has_lost_redis = True
    assert await owner._try_acquire() is None
    # What it may have written before the outage is not what Redis has now.
    redis_client.hincrby(KEYS.leadership, "epoch", -1)
    owner._on_lost(before, True)
    assert await owner._try_acquire() is None
    # It leads after the outage, and then ends.
    await other._store.reacquire("unix:/leader")
    after = await owner._store.leader()
    assert after is not None
    assert await owner._try_acquire() is None
    owner._on_lost(after, True)
    assert await owner._try_acquire() is not None, "without a wait"


async def test_a_lease_that_is_released_after_an_outage_is_free(standbys, pass_time) -> None:
    owner, other = standbys
    assert await other._store.acquire("unix:/leader", lease_ms=3000) is not None
    leader = await owner._store.leader()
    assert leader is not None
    assert await owner._try_acquire() is None
    owner._has_lost_redis = True
    assert await owner._try_acquire() is None
    await other._store.release()
    # Redis may have lost who has acquired it since.
    assert await owner._try_acquire() is None
    owner._on_lost(leader, False)
    assert await owner._try_acquire() is not None, "without a wait"


async def test_one_that_is_no_candidate_any_more_watches_no_leader(
    standbys, cluster, members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection would otherwise stay, one of each scheduler that has ever stood by."""
    owner, other = standbys
    await beat(cluster.member("unix:/leader"), *members)
    members[0].lead(SHARD, lambda: ShardLoad("unix:/owner"))
    await beat(*members)
    assert await owner._store.acquire("unix:/leader", lease_ms=3000) is not None
    acquiring = asyncio.create_task(other.acquire())
    await until(lambda: other._watch._leader is not None, "an attempt")
    # As if the leader had responded.
    other._watch._task.cancel()
    other._watch.is_watching = True
    await until(lambda: other._is_idle, "a sleep without a timer")
    while members[1].is_candidate(SHARD):
        await beat(cluster.member("unix:/new"), members[1])
    await until(lambda: other._watch._leader is None, "the end of the watch")
    acquiring.cancel()


async def test_a_candidate_without_a_map_finds_the_leader(
    redis_url: str, cluster: ScriptedCluster
) -> None:
    cluster.map = b"of another version"
    others = [cluster.member(f"unix:/{number}") for number in range(9)]
    member = cluster.member("unix:/new")
    await beat(*others, member)
    store = Store.at(redis_url, shard=0)
    standby = Standby(store.lease, "unix:/new", LEASE_S, None, member, 0)
    while member.is_candidate(0):
        # Their random ids decide who stands by.
        others.append(cluster.member(f"unix:/{len(others)}"))
        await beat(*others, member)
    assert not member.is_known.is_set()
    assert await store.lease.acquire("unix:/leader", lease_ms=3000) is not None
    acquiring = asyncio.create_task(standby.acquire())
    await until(lambda: standby._is_idle, "a sleep")
    for other in others:
        member.mark_ended(other.address)
    assert member.is_candidate(0)
    await until(lambda: standby.leader_address == "unix:/leader", "an attempt")
    acquiring.cancel()
    await store.lease.release()
    await store.close()
