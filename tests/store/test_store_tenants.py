"""The stored state of the tenants: replaced, deleted, aged by Redis' clock, fenced."""

import pytest
import redis

from scheduler_svc.store.errors import LeadershipLost, StaleEpoch
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.store import Store

KEYS = ShardKeys(0)


async def test_the_last_state_is_read_with_its_age(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    assert await standby.tenants() == (b"", 0)
    await store.write_tenants(b"one")
    await store.write_tenants(b"two")
    redis_client.hincrby(KEYS.tenants, "written_ms", -5000)
    state, age_s = await standby.tenants()
    assert state == b"two"
    assert 5 <= age_s < 60
    # Redis' clock was set back.
    redis_client.hincrby(KEYS.tenants, "written_ms", 3_600_000)
    assert await standby.tenants() == (b"two", 0)
    assert redis_client.ttl(KEYS.tenants) > 86_400


async def test_an_empty_state_is_deleted(store: Store, redis_client: redis.Redis) -> None:
    await store.write_tenants(b"one")
    await store.write_tenants(b"")
    assert not redis_client.exists(KEYS.tenants)


async def test_only_the_leader_writes(
    store: Store, successor: Store, redis_client: redis.Redis
) -> None:
    await successor.write_tenants(b"new")
    with pytest.raises(StaleEpoch):
        await store.write_tenants(b"old")
    assert (await store.tenants())[0] == b"new"
    redis_client.delete(KEYS.leadership)
    with pytest.raises(LeadershipLost):
        await successor.write_tenants(b"newer")
