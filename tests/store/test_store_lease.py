"""The leadership lease: acquired, renewed, released, lost and reacquired."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import redis

from scheduler_svc.store.errors import LeadershipLost, StaleEpoch
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.leadership import StoredLeader
from scheduler_svc.store.store import Store

KEYS = ShardKeys(0)

LEASE_MS = 3000
HOUR_MS = 3_600_000


def age_lease(client: redis.Redis, by_ms: int) -> None:
    """Move the leader's last renewal into the past."""
    client.hincrby(KEYS.leadership, "renewed_ms", -by_ms)


async def test_there_is_no_leader_before_the_first_acquisition(standby: Store) -> None:
    assert await standby.lease.leader() is None
    with pytest.raises(LeadershipLost):
        await standby.lease.renew()
    with pytest.raises(LeadershipLost):
        await standby.lease.reacquire("here")
    with pytest.raises(LeadershipLost):
        standby.pool(1, 11)
    await standby.lease.release()  # not held
    leadership = await standby.lease.acquire("unix:/here", LEASE_MS)
    assert leadership == standby.leadership


async def test_every_scheduler_can_read_the_leader(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    own = store.leadership
    assert len(own.holder) == 16
    seconds, _ = redis_client.time()
    assert abs(own.epoch - seconds * 1000) < 60_000
    assert (await standby.lease.leader()).address == "first"
    stored = redis_client.hgetall(KEYS.leadership)
    assert (int(stored[b"epoch"]), stored[b"holder"]) == (own.epoch, own.holder)
    age_lease(redis_client, HOUR_MS)
    assert await store.lease.renew() == redis_client.info("server")["run_id"]
    renewed_ms = int(redis_client.hget(KEYS.leadership, "renewed_ms"))
    assert 0 <= redis_client.time()[0] * 1000 - renewed_ms + 1000 < HOUR_MS


async def test_an_expired_lease_goes_to_a_standby(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    assert await standby.lease.acquire("second", LEASE_MS) is None
    age_lease(redis_client, LEASE_MS)
    await store.lease.renew()  # just in time
    assert await standby.lease.acquire("second", LEASE_MS) is None
    age_lease(redis_client, LEASE_MS)
    taken = await standby.lease.acquire("second", LEASE_MS)
    assert taken is not None
    assert taken.epoch > store.leadership.epoch
    assert taken.holder != store.leadership.holder


async def test_the_lease_of_a_leader_that_has_ended_is_free(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    ended = store.leadership.epoch
    assert await standby.lease.acquire("second", LEASE_MS, lost_epoch=ended - 1) is None
    taken = await standby.lease.acquire("second", LEASE_MS, lost_epoch=ended)
    assert taken is not None
    assert taken.epoch > ended
    # It was an error: the leader had not ended. It is fenced, and cannot return the favour.
    with pytest.raises(StaleEpoch):
        await store.lease.renew()
    assert await store.lease.acquire("first", LEASE_MS, lost_epoch=ended) is None


async def test_a_leaders_late_renewal_after_the_takeover_changes_nothing(
    store: Store, successor: Store, redis_client: redis.Redis
) -> None:
    before = redis_client.hgetall(KEYS.leadership)
    with pytest.raises(StaleEpoch):
        await store.lease.renew()
    with pytest.raises(StaleEpoch):
        await store.lease.reacquire("first")
    await store.lease.release()
    assert redis_client.hgetall(KEYS.leadership) == before
    await successor.lease.renew()


async def test_a_released_lease_is_acquired_at_once(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    previous = store.leadership
    await store.lease.release()
    await store.lease.release()  # as after a lost reply
    assert (await standby.lease.leader()).address == ""
    assert redis_client.hgetall(KEYS.leadership) == {b"epoch": b"%d" % previous.epoch}
    with pytest.raises(LeadershipLost):
        await store.lease.renew()
    taken = await standby.lease.acquire("second", LEASE_MS)
    assert taken is not None
    assert taken.epoch > previous.epoch
    # A scheduler that released the lease may acquire it again.
    await standby.lease.release()
    again = await store.lease.acquire("first", LEASE_MS)
    assert again is not None
    assert again.epoch > taken.epoch


async def test_of_two_standbys_that_race_for_the_lease_one_acquires_it(
    store: Store, redis_url: str, redis_client: redis.Redis
) -> None:
    standbys = [Store.at(redis_url) for _ in range(5)]
    await store.lease.release()
    taken = await asyncio.gather(*(standby.lease.acquire("one", LEASE_MS) for standby in standbys))
    [winner] = [leadership for leadership in taken if leadership is not None]
    stored = redis_client.hgetall(KEYS.leadership)
    assert (int(stored[b"epoch"]), stored[b"holder"]) == (winner.epoch, winner.holder)
    for standby in standbys:
        await standby.close()


async def test_an_acquisition_without_a_reply_is_repeated_without_waiting(
    standby: Store, store: Store, lost_replies: Callable[[], AbstractContextManager[None]]
) -> None:
    await store.lease.release()
    with lost_replies():
        await standby.lease.acquire("second", LEASE_MS)
    assert await store.lease.acquire("first", LEASE_MS) is None
    first = await standby.lease.acquire("second", LEASE_MS)
    assert first is not None
    with lost_replies():
        await standby.lease.reacquire("second")
    with pytest.raises(StaleEpoch):
        await standby.lease.renew()
    assert (await standby.lease.reacquire("second")).epoch > first.epoch
    await standby.lease.renew()


@pytest.mark.parametrize("lost", ["entry", "last second"])
async def test_an_epoch_lost_with_redis_last_writes_is_followed_by_a_higher_one(
    store: Store, successor: Store, redis_client: redis.Redis, lost: str
) -> None:
    """Redis is restored to its state before the takeover, or empty."""
    epoch = successor.leadership.epoch
    redis_client.delete(KEYS.leadership)
    if lost == "last second":
        own = store.leadership
        older = {"epoch": own.epoch, "holder": own.holder, "address": "", "renewed_ms": own.epoch}
        redis_client.hset(KEYS.leadership, mapping=older)
    with pytest.raises(LeadershipLost):
        await successor.lease.renew()
    assert (await successor.lease.reacquire("second")).epoch > epoch
    await successor.lease.renew()
    with pytest.raises(StaleEpoch):
        await store.lease.renew()


async def test_a_standby_that_precedes_a_leader_without_an_entry_has_the_higher_epoch(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    redis_client.delete(KEYS.leadership)
    taken = await standby.lease.acquire("second", LEASE_MS)
    assert taken is not None
    assert taken.epoch > store.leadership.epoch
    with pytest.raises(StaleEpoch):
        await store.lease.reacquire("first")


async def test_epochs_rise_even_if_redis_clock_was_set_back(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    ahead = store.leadership.epoch + 10**9
    redis_client.hset(KEYS.leadership, mapping={"epoch": ahead, "renewed_ms": ahead})
    # After the clock was set back a standby does not wait until that time is reached again.
    taken = await standby.lease.acquire("second", LEASE_MS)
    assert taken is not None
    assert taken.epoch == ahead + 1
    redis_client.delete(KEYS.leadership)
    assert (await standby.lease.reacquire("second")).epoch == ahead + 2


async def test_a_holder_is_given_up_by_a_release_or_the_next_acquisition(
    store: Store, standby: Store
) -> None:
    leader = await standby.lease.leader()
    assert leader == StoredLeader(store.leadership.epoch, store.leadership.holder, "first")
    assert store.lease.is_own(leader.holder)
    assert not standby.lease.is_own(leader.holder)
    waiting = asyncio.create_task(store.lease.wait_given_up(leader.holder))
    await asyncio.sleep(0)
    assert not waiting.done()
    again = await store.lease.reacquire("first")
    await asyncio.wait_for(waiting, 5)
    waiting = asyncio.create_task(store.lease.wait_given_up(again.holder))
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.lease.release()
    await asyncio.wait_for(waiting, 5)
    await store.lease.wait_given_up(again.holder)
