"""The age of pools without a lane, over the terms of several leaders."""

from collections.abc import AsyncIterator

import pytest
import redis

from scheduler_svc.engine import detached_pools
from scheduler_svc.engine.detached_pools import DetachedPools
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.store import Store

KEYS = ShardKeys(0)

INCARNATION = 0xFEED


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store.at(redis_url)
    await store.lease.acquire("leader", lease_ms=3000)
    pool = store.pool(INCARNATION, num_blocks=11)
    await pool.open(last_finished_step=0)
    yield store
    await store.pool(INCARNATION, num_blocks=0).drop()
    await store.close()


@pytest.fixture
def without_rejoining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new leader drop old pools at once."""
    monkeypatch.setattr(detached_pools, "REJOIN_S", 0.0)


async def next_leader(store: Store) -> DetachedPools:
    """The detached pools of a new term."""
    await store.lease.acquire("leader", lease_ms=0)
    return DetachedPools(
        store, RecordWriter(store, 60, 2**20), dict.fromkeys(await store.pools(), 0)
    )


def pass_time(client: redis.Redis, seconds: float) -> None:
    """Let the pool be detached for longer."""
    state = KEYS.pool(INCARNATION).state
    client.hset(
        state, "detached_ms", int(client.hget(state, "detached_ms")) - round(seconds * 1000)
    )


@pytest.mark.usefixtures("without_rejoining")
async def test_a_minute_without_a_lane_is_counted_over_many_leaders(store, redis_client):
    for _ in range(6):
        pools = await next_leader(store)
        await pools.drop_expired()
        assert pools.steps == {INCARNATION: 0}
        pass_time(redis_client, 10)
    pools = await next_leader(store)
    await pools.drop_expired()
    assert not pools.steps
    assert not await store.pools()


@pytest.mark.usefixtures("without_rejoining")
async def test_an_opened_pool_begins_anew(store, redis_client):
    pools = await next_leader(store)
    await pools.drop_expired()
    pass_time(redis_client, 50)
    pools = await next_leader(store)
    pool = store.pool(INCARNATION, num_blocks=11)
    await pools.reopen(pool, "a:1", last_finished_step=0)
    pools.add(pool, "a:1", 1, [])
    await pools.drop_expired()
    pass_time(redis_client, 50)
    pools = await next_leader(store)
    await pools.drop_expired()
    assert pools.steps == {INCARNATION: 0}


async def test_a_worker_may_return_to_a_leader_that_finds_its_pool_old(store, redis_client):
    await (await next_leader(store)).drop_expired()
    pass_time(redis_client, 3600)
    pools = await next_leader(store)
    await pools.drop_expired()
    assert pools.steps == {INCARNATION: 0}


async def test_a_former_leader_does_not_detach_a_pool(store, redis_url, redis_client):
    former = store.pool(INCARNATION, num_blocks=0)
    await store.lease.acquire("leader", lease_ms=0)
    await store.pool(INCARNATION, num_blocks=11).open(last_finished_step=0)
    with pytest.raises(StaleEpoch):
        await former.detach()
    assert redis_client.hget(KEYS.pool(INCARNATION).state, "detached_ms") is None


async def test_a_pool_of_which_the_opening_failed_is_dropped_with_its_worker(
    store, redis_url, redis_client
):
    """Redis refuses scripts after the pool is listed, and the worker dies before it is back."""
    pools = DetachedPools(store, RecordWriter(store, 60, 2**20), {})
    await pools.reopen(store.pool(INCARNATION, num_blocks=11), "a:1", last_finished_step=0)
    redis_client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
    try:
        with pytest.raises(StoreUnavailable):
            await pools.reopen(store.pool(0xDEAD, num_blocks=11), "a:2", last_finished_step=0)
    finally:
        redis_client.execute_command("ACL", "SETUSER", "default", "+@all")
    assert set(await store.pools()) == {INCARNATION, 0xDEAD}
    successor = store.pool(0xBEEF, num_blocks=11)
    await pools.reopen(successor, "a:2", last_finished_step=0)
    await pools.drop_expired()
    assert set(await store.pools()) == {INCARNATION, 0xBEEF}
    await successor.drop()
