"""Interleavings of crashes, lost replies and lost writes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

import pytest
import redis
from store_endings import finish

from quire.launcher.redis import EmbeddedRedis
from scheduler_svc.store.errors import LeadershipLost, RecordMismatch, StaleEpoch, WrongStep
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.requests import (
    Ending,
    OutputRange,
    RecordOutcome,
    RequestKey,
    RequestRecord,
    RequestState,
    StoredRequest,
)
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import (
    Admission,
    Commit,
    CommitReply,
    JournalEntry,
    PrefixMatch,
    TokenRanges,
)

KEYS = ShardKeys(0)

HASH = bytes(32)
OTHER_HASH = bytes(31) + b"\x01"
LEASE_MS = 3000
RECORD = RequestRecord(RequestKey("ann", "r-1"), b"digest", (1, 2), b"", sequence_id=1)


@pytest.fixture
async def lasting(own_redis: EmbeddedRedis) -> AsyncIterator[Store]:
    """A leader on a Redis that the test may stop and start."""
    store = Store.at(own_redis.url)
    await store.lease.acquire("first", LEASE_MS)
    yield store
    await store.close()


def restart_from_file(server: EmbeddedRedis) -> None:
    """Restart Redis from the file that it wrote last."""
    server.stop()
    server.start()


async def test_a_commit_is_repeated_after_a_lost_reply(
    pool: Pool, lost_replies: Callable[[], AbstractContextManager[None]]
) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 2),)))
    commit = Commit(
        3, token_ranges=TokenRanges([1], [0], [1], [7]), admissions=(Admission(2, 0, (), 1),)
    )
    with lost_replies():
        await pool.commit(commit)
    # It was executed: the repeat gets the same block, and journals nothing again.
    assert await pool.commit(commit) == CommitReply(7, (), ((3,),))
    assert await pool.journal() == [JournalEntry(3, commit.token_ranges)]
    assert (await pool.audit()).references == {1: 1, 2: 1, 3: 1}


async def test_records_are_written_compacted_and_ended_again_after_lost_replies(
    store: Store, lost_replies: Callable[[], AbstractContextManager[None]]
) -> None:
    with lost_replies():
        await store.record([RECORD], [False])
    assert await store.record([RECORD], [False]) == [RecordOutcome.NEW]
    output = OutputRange(RECORD.key, 0, 0, (7, 8))
    with lost_replies():
        await store.append_output([output])
    await store.append_output([output])
    ending = Ending(RECORD.key, RequestState.FINISHED, num_cached_tokens=16)
    with lost_replies():
        await finish(store, [ending])
    with pytest.raises(RecordMismatch):
        await store.append_output([output])  # an ended record is refused
    await finish(store, [ending])
    ended = StoredRequest(RECORD, RequestState.FINISHED, {0: (7, 8)}, num_cached_tokens=16)
    assert await store.load(RECORD.key) == ended


async def test_an_earlier_leaders_commit_arrives_after_the_new_one_reopened_the_pool(
    pool: Pool, standby: Store
) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 1, (HASH,)),)))
    late = Commit(
        3, token_ranges=TokenRanges([1], [0], [1], [7]), admissions=(Admission(2, 0, (), 3),)
    )
    assert await standby.lease.acquire("second", lease_ms=0) is not None
    theirs = standby.pool(pool.incarnation, pool.num_blocks)
    step = await theirs.open(last_finished_step=2)
    with pytest.raises(StaleEpoch):
        await pool.commit(late)
    assert await theirs.journal() == []
    assert (await theirs.audit()).references == {}
    # The new leader gets the reply of its own step with that number.
    assert step == 3
    reply = await theirs.commit(Commit(4, admissions=(Admission(3, 0, (HASH,), 1),)))
    assert reply.admitted == ((1, 2),)
    with pytest.raises(StaleEpoch):
        await pool.commit(Commit(4))
    await theirs.drop()


async def test_an_earlier_leaders_commit_arrives_between_the_takeover_and_the_reopening(
    pool: Pool, successor: Store
) -> None:
    """It is stored, and its tokens are in the journal for the new leader to find."""
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 1),)))
    ranges = TokenRanges([1], [0], [1], [7])
    await pool.commit(Commit(3, token_ranges=ranges, admissions=(Admission(2, 0, (), 1, (HASH,)),)))
    theirs = successor.pool(pool.incarnation, pool.num_blocks)
    assert await theirs.open(last_finished_step=2) == 4
    assert await theirs.journal() == [JournalEntry(3, ranges)]
    # The worker never ran step 3, so its blocks are not filled.
    assert await theirs.match([[HASH]]) == [PrefixMatch(0, 0)]
    await theirs.drop()


async def test_a_hit_block_is_taken_between_match_and_commit(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 1, (HASH,)),)))
    await pool.commit(Commit(3, returned_blocks=(1,), removed=(1,)))
    assert await pool.match([[HASH]]) == [PrefixMatch(num_hits=1, num_free_hits=1)]
    taken = await pool.commit(Commit(4, admissions=(Admission(2, 0, (), 10),)))
    assert taken.num_free_blocks == 0
    await pool.commit(Commit(5, returned_blocks=(10,)))
    # Omitted; the next match finds what is cached now.
    hit = Admission(3, 0, (HASH,), 0)
    assert await pool.commit(Commit(6, admissions=(hit,))) == CommitReply(1, (), (None,))
    assert await pool.match([[HASH]]) == [PrefixMatch(num_hits=0, num_free_hits=0)]


async def test_redis_is_rolled_back_behind_the_worker(
    pool: Pool, redis_client: redis.Redis
) -> None:
    """Block 1 has other content by now; the older Redis still has its old hash."""
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 1, (HASH,)),)))
    keys = KEYS.pool(pool.incarnation).all
    dumped = {key: redis_client.dump(key) for key in keys if redis_client.exists(key)}
    await pool.commit(Commit(3, returned_blocks=(1,), withdrawals=(1,), removed=(1,)))
    await pool.commit(Commit(4, admissions=(Admission(2, 0, (), 1, (OTHER_HASH,)),)))
    redis_client.delete(*keys)
    for key, value in dumped.items():
        redis_client.restore(key, 0, value)
    with pytest.raises(WrongStep):
        await pool.commit(Commit(5))
    assert await pool.match([[HASH]]) == [PrefixMatch(1, 0)]
    assert await pool.open(last_finished_step=4) == 5
    assert await pool.match([[HASH], [OTHER_HASH]]) == [PrefixMatch(0, 0), PrefixMatch(0, 0)]
    assert (await pool.audit()).free_order == (1, *range(2, 11))
    await pool.commit(Commit(6, admissions=(Admission(3, 0, (), 1),)))


async def test_redis_is_rolled_back_behind_the_leader_only(pool: Pool) -> None:
    """The worker has finished no more than Redis has; later plans may be half executed."""
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 1, (HASH,)),)))
    assert await pool.open(last_finished_step=2, leader_step=2) == 3
    assert await pool.match([[HASH]]) == [PrefixMatch(1, 1)]
    assert await pool.open(last_finished_step=2, leader_step=7) == 8
    assert await pool.match([[HASH]]) == [PrefixMatch(0, 0)]


async def test_redis_restarts_with_an_older_file_and_the_leader_restores_it(
    own_redis: EmbeddedRedis, lasting: Store
) -> None:
    first = lasting.leadership
    run_id = await lasting.lease.renew()
    pool = lasting.pool(1, 11)
    step = await pool.open(0)
    await lasting.record([RECORD], [False])
    await pool.commit(Commit(step + 1, admissions=(Admission(1, 0, (), 1, (HASH,)),)))
    with redis.Redis.from_url(own_redis.url) as client:
        client.save()
    ranges = TokenRanges([1], [0], [1], [7])
    await pool.commit(Commit(step + 2, token_ranges=ranges))
    await lasting.append_output([OutputRange(RECORD.key, 0, 0, (7,))])
    restart_from_file(own_redis)
    # The entry exists: only the run id shows that a second of writes is missing.
    assert await lasting.lease.renew() != run_id
    second = await lasting.lease.reacquire("first")
    assert second.epoch > first.epoch
    live = StoredRequest(RECORD, RequestState.LIVE, {0: (7,)})
    assert await lasting.load_live() == [StoredRequest(RECORD, RequestState.LIVE, {})]
    await lasting.replace_live([live])
    assert await lasting.load_live() == [live]
    pool = lasting.pool(1, 11)
    assert await pool.open(last_finished_step=step + 1, leader_step=step + 2) == step + 3
    assert await pool.match([[HASH]]) == [PrefixMatch(0, 0)]
    await pool.commit(Commit(step + 4))


async def test_redis_restarts_without_the_takeover_and_the_new_leader_has_a_higher_epoch(
    own_redis: EmbeddedRedis, lasting: Store
) -> None:
    pool = lasting.pool(1, 11)
    step = await pool.open(0)
    with redis.Redis.from_url(own_redis.url) as client:
        client.save()
    new = Store.at(own_redis.url)
    second = await new.lease.acquire("second", lease_ms=0)
    assert second is not None
    theirs = new.pool(1, 11)
    await theirs.open(step)
    restart_from_file(own_redis)
    # In Redis the earlier leader leads and holds the pool.
    for lost in (new.lease.renew(), new.record([RECORD], [False]), theirs.commit(Commit(step + 2))):
        with pytest.raises(LeadershipLost):
            await lost
    assert (await new.lease.reacquire("second")).epoch > second.epoch
    with pytest.raises(StaleEpoch):
        await lasting.lease.renew()
    await new.close()


async def test_redis_restarts_empty(own_redis: EmbeddedRedis, lasting: Store) -> None:
    first = lasting.leadership
    await lasting.record([RECORD], [False])
    restart_from_file(own_redis)
    assert await lasting.lease.leader() is None
    with pytest.raises(LeadershipLost):
        await lasting.lease.renew()
    assert (await lasting.lease.reacquire("first")).epoch > first.epoch
    live = StoredRequest(RECORD, RequestState.LIVE, {0: (7,)})
    await lasting.replace_live([live])
    assert await lasting.load(RECORD.key) == live


async def test_a_renewal_is_not_held_up_by_other_calls(
    own_redis: EmbeddedRedis, lasting: Store
) -> None:
    slow = asyncio.create_task(lasting._connection.execute("BLPOP", "nothing", 30))
    await asyncio.sleep(0)
    await lasting.lease.renew()
    slow.cancel()
    with redis.Redis.from_url(own_redis.url) as client:
        client.lpush("nothing", "something")
