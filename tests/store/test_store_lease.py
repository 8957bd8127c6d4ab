"""Who leads: taken, kept, left, lost and taken anew."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import redis

from scheduler_svc.store.errors import LeadLost, StaleEpoch
from scheduler_svc.store.keys import LEADERSHIP
from scheduler_svc.store.leadership import Leader
from scheduler_svc.store.store import Store

LEASE_MS = 3000
HOUR_MS = 3_600_000


def age_lease(client: redis.Redis, by_ms: int) -> None:
    """As if the leader had last renewed so much earlier."""
    client.hincrby(LEADERSHIP, "renewed_ms", -by_ms)


async def test_nobody_leads_before_somebody_takes_the_lead(standby: Store) -> None:
    assert await standby.leader() is None
    with pytest.raises(LeadLost):
        await standby.renew()
    with pytest.raises(LeadLost):
        await standby.retake_lead("here")
    with pytest.raises(LeadLost):
        standby.pool(1, 11)
    await standby.release_lead()  # of which it has none
    leadership = await standby.take_lead("unix:/here", LEASE_MS)
    assert leadership == standby.leadership


async def test_the_leader_is_there_for_all_to_see(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    leader = await standby.leader()
    assert leader is not None
    seconds, _ = redis_client.time()
    assert abs(leader.epoch - seconds * 1000) < 60_000
    own, run_id = store.leadership, redis_client.info("server")["run_id"]
    assert len(own.holder) == 16
    assert leader == Leader(own.epoch, own.holder, "first", leader.idle_ms, run_id)
    assert leader.idle_ms is not None
    age_lease(redis_client, HOUR_MS)
    aged = await standby.leader()
    assert aged is not None
    assert aged.idle_ms is not None
    assert aged.idle_ms >= HOUR_MS
    assert (await store.renew()).run_id == run_id
    renewed = await standby.leader()
    assert renewed is not None
    assert renewed.idle_ms is not None
    assert 0 <= renewed.idle_ms < HOUR_MS


async def test_a_lead_not_renewed_goes_to_a_standby(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    assert await standby.take_lead("second", LEASE_MS) is None
    age_lease(redis_client, LEASE_MS)
    await store.renew()  # just in time
    assert await standby.take_lead("second", LEASE_MS) is None
    age_lease(redis_client, LEASE_MS)
    taken = await standby.take_lead("second", LEASE_MS)
    assert taken is not None
    assert taken.epoch > store.leadership.epoch
    assert taken.holder != store.leadership.holder


async def test_a_leaders_late_renewal_after_the_takeover_changes_nothing(
    store: Store, successor: Store, redis_client: redis.Redis
) -> None:
    before = redis_client.hgetall(LEADERSHIP)
    with pytest.raises(StaleEpoch):
        await store.renew()
    with pytest.raises(StaleEpoch):
        await store.retake_lead("first")
    await store.release_lead()
    assert redis_client.hgetall(LEADERSHIP) == before
    await successor.renew()


async def test_a_released_lead_is_taken_at_once(store: Store, standby: Store) -> None:
    former = store.leadership
    await store.release_lead()
    await store.release_lead()  # as after a lost reply
    leader = await standby.leader()
    assert leader is not None
    assert (leader.epoch, leader.holder, leader.address) == (former.epoch, b"", "")
    assert leader.idle_ms is None
    with pytest.raises(LeadLost):
        await store.renew()
    taken = await standby.take_lead("second", LEASE_MS)
    assert taken is not None
    assert taken.epoch > former.epoch
    # Who has left the lead may come back.
    await standby.release_lead()
    again = await store.take_lead("first", LEASE_MS)
    assert again is not None
    assert again.epoch > taken.epoch


async def test_of_two_standbys_that_race_for_the_lead_one_gets_it(
    store: Store, redis_url: str
) -> None:
    standbys = [await Store.connect(redis_url) for _ in range(5)]
    await store.release_lead()
    taken = await asyncio.gather(*(standby.take_lead("one", LEASE_MS) for standby in standbys))
    [winner] = [leadership for leadership in taken if leadership is not None]
    leader = await store.leader()
    assert leader is not None
    assert (leader.epoch, leader.holder) == (winner.epoch, winner.holder)
    for standby in standbys:
        await standby.close()


async def test_a_take_without_an_answer_is_repeated_without_waiting(
    standby: Store, store: Store, unanswered: Callable[[], AbstractContextManager[None]]
) -> None:
    await store.release_lead()
    with unanswered():
        await standby.take_lead("second", LEASE_MS)
    assert await store.take_lead("first", LEASE_MS) is None
    first = await standby.take_lead("second", LEASE_MS)
    assert first is not None
    with unanswered():
        await standby.retake_lead("second")
    with pytest.raises(StaleEpoch):
        await standby.renew()
    assert (await standby.retake_lead("second")).epoch > first.epoch
    await standby.renew()


@pytest.mark.parametrize("lost", ["entry", "last second"])
async def test_an_epoch_lost_with_redis_last_writes_is_followed_by_a_higher_one(
    store: Store, successor: Store, redis_client: redis.Redis, lost: str
) -> None:
    """Redis comes back without the takeover: as before it, or empty."""
    epoch = successor.leadership.epoch
    redis_client.delete(LEADERSHIP)
    if lost == "last second":
        own = store.leadership
        older = {"epoch": own.epoch, "holder": own.holder, "address": "", "renewed_ms": own.epoch}
        redis_client.hset(LEADERSHIP, mapping=older)
    with pytest.raises(LeadLost):
        await successor.renew()
    assert (await successor.retake_lead("second")).epoch > epoch
    await successor.renew()
    with pytest.raises(StaleEpoch):
        await store.renew()


async def test_a_standby_that_goes_before_a_leader_without_entry_has_the_higher_epoch(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    redis_client.delete(LEADERSHIP)
    taken = await standby.take_lead("second", LEASE_MS)
    assert taken is not None
    assert taken.epoch > store.leadership.epoch
    with pytest.raises(StaleEpoch):
        await store.retake_lead("first")


async def test_epochs_rise_even_where_redis_clock_has_fallen_behind(
    store: Store, standby: Store, redis_client: redis.Redis
) -> None:
    ahead = store.leadership.epoch + 10**9
    redis_client.hset(LEADERSHIP, mapping={"epoch": ahead, "renewed_ms": ahead})
    # A clock that was set back keeps nobody waiting until it is that late again.
    taken = await standby.take_lead("second", LEASE_MS)
    assert taken is not None
    assert taken.epoch == ahead + 1
    redis_client.delete(LEADERSHIP)
    assert (await standby.retake_lead("second")).epoch == ahead + 2
