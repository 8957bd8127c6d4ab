"""Request records: written, compacted, ended and expired."""

from collections.abc import Coroutine
from typing import Any

import pytest
import redis
from store_endings import finish

from quire.service.tracing.context import TraceContext
from scheduler_svc.store.errors import LeadershipLost, RecordMismatch, StaleEpoch
from scheduler_svc.store.keys import ShardKeys
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

KEYS = ShardKeys(0)

KEY = RequestKey("ann", "r-1")
OTHER_KEY = RequestKey("", "r-1")
NEW, KNOWN, CONFLICT = RecordOutcome


def record(key: RequestKey = KEY, sequence_id: int = 2**64 - 1, **given: object) -> RequestRecord:
    fields: dict[str, object] = {
        "digest": b"\x00digest\xff",
        "prompt_token_ids": (1, 2**32 - 1),
        "params": b"\x08\x00",
    }
    return RequestRecord(key=key, sequence_id=sequence_id, **{**fields, **given})


async def write(store: Store, *records: RequestRecord) -> None:
    assert await store.record(records, [False] * len(records)) == [NEW] * len(records)


async def discard(store: Store, *keys: RequestKey) -> None:
    """Delete all live records."""
    await store.discard([r.record for r in await store.load_live() if r.record.key in keys])


def ttls(client: redis.Redis, key: RequestKey = KEY) -> list[int]:
    return [client.ttl(name) for name in KEYS.request(key.principal, key.request_id)]


async def test_a_record_is_read_as_it_was_written(store: Store) -> None:
    full = record(
        deadline_ms=1_900_000_000_000,
        opaque=b"\x00\x01",
        num_choices=16,
        priority=-(2**31),
        cache_salt=b"\x00salt",
        resume_window_s=0,
        trace_context=TraceContext(2**128 - 1, 1, True, "vendor=x,other=y"),
    )
    bare = record(OTHER_KEY, 5, prompt_token_ids=())
    await write(store, full, bare)
    assert await store.load(KEY) == StoredRequest(full, RequestState.LIVE, {})
    assert await store.load(OTHER_KEY) == StoredRequest(bare, RequestState.LIVE, {})
    assert await store.load(RequestKey("ann", "r-2")) is None
    assert [found.record for found in await store.load_live()] == [bare, full]
    await store.discard([full, bare])
    assert await store.load(KEY) is None
    assert await store.load_live() == []


async def test_a_record_of_an_earlier_version_has_no_trace(
    store: Store, redis_client: redis.Redis
) -> None:
    old = record(KEY, 1)
    await write(store, old)
    redis_client.hdel(KEYS.request(KEY.principal, KEY.request_id)[0], "trace_context")
    assert await store.load(KEY) == StoredRequest(old, RequestState.LIVE, {})
    assert [found.record for found in await store.load_live()] == [old]
    await store.discard([old])


async def test_a_live_id_is_known_or_taken(store: Store) -> None:
    await write(store, record(sequence_id=1))
    other = {"digest": b"another"}
    records = [
        record(sequence_id=2),
        record(sequence_id=3, **other),
        record(OTHER_KEY, 4),
        record(OTHER_KEY, 5, **other),
        record(OTHER_KEY, 6),
    ]
    outcomes = [KNOWN, CONFLICT, NEW, CONFLICT, KNOWN]
    assert await store.record(records, [False] * 5) == outcomes
    stored = await store.load(KEY)
    assert stored is not None
    assert stored.record.sequence_id == 1
    # The same call once more, after a lost connection, is not taken for another request.
    assert await store.record(records, [True] * 5) == outcomes
    await discard(store, KEY, OTHER_KEY)


@pytest.mark.parametrize(
    ("state", "outcomes"),
    [
        # The same digest; the same again; another digest; another again.
        (RequestState.FINISHED, (KNOWN, KNOWN, CONFLICT, CONFLICT)),
        (RequestState.CANCELLED, (NEW, KNOWN, NEW, NEW)),
        (RequestState.FAILED, (NEW, KNOWN, NEW, NEW)),
    ],
)
async def test_an_ended_id_is_known_taken_or_free(
    store: Store,
    redis_client: redis.Redis,
    state: RequestState,
    outcomes: tuple[RecordOutcome, ...],
) -> None:
    cases = [(b"d", False), (b"d", True), (b"other", False), (b"other", True)]
    for number, ((digest, again), outcome) in enumerate(zip(cases, outcomes, strict=True)):
        key = RequestKey("ann", f"ended-{number}")
        first = record(key, 10, digest=b"d", opaque=b"first")
        await write(store, first)
        await store.append_output([OutputRange(key, 0, 0, (7,))])
        await finish(store, [Ending(key, state, b"why")])
        second = record(key, 20, digest=digest)
        for _ in range(2):  # the call, and its repeat
            assert await store.record([second], [again]) == [outcome]
        stored = await store.load(key)
        if outcome == NEW:
            assert stored == StoredRequest(second, RequestState.LIVE, {})
            assert ttls(redis_client, key) == [-1, -2]
            await store.discard([second])
        else:
            assert stored == StoredRequest(first, state, {0: (7,)}, b"why")


async def test_only_what_was_not_accepted_is_discarded(store: Store) -> None:
    await write(store, record(sequence_id=1))
    # Submitted again, and recorded without a reply: it existed before.
    await store.record([record(sequence_id=2)], [True])
    await store.discard([record(sequence_id=2)])
    assert await store.load(KEY) == StoredRequest(record(sequence_id=1), RequestState.LIVE, {})
    await discard(store, KEY)


async def test_output_is_appended_once(store: Store) -> None:
    await write(store, record(), record(OTHER_KEY, 2))
    await store.append_output([OutputRange(KEY, 0, 0, (7, 8)), OutputRange(OTHER_KEY, 0, 0, (1,))])
    await store.append_output([OutputRange(KEY, 0, 2, (9,)), OutputRange(KEY, 0, 3, (10,))])
    await store.append_output(
        [OutputRange(KEY, 0, 1, (8, 9, 10, 2**32 - 1)), OutputRange(OTHER_KEY, 0, 0, ())]
    )
    await store.append_output(
        [OutputRange(OTHER_KEY, 3, 0, (5,)), OutputRange(OTHER_KEY, 3, 1, (6,))]
    )
    stored = await store.load(KEY)
    assert stored is not None
    assert stored.output_token_ids == {0: (7, 8, 9, 10, 2**32 - 1)}
    other = await store.load(OTHER_KEY)
    assert other is not None
    assert other.output_token_ids == {0: (1,), 3: (5, 6)}
    await discard(store, KEY, OTHER_KEY)


async def test_log_probabilities_are_stored_and_packed_with_their_tokens(store: Store) -> None:
    await write(store, record(num_choices=2))
    await store.append_output(
        [OutputRange(KEY, 0, 0, (7, 8), b"7777788888"), OutputRange(KEY, 1, 0, (5,))]
    )
    await store.append_output([OutputRange(KEY, 0, 1, (8, 9), b"8888899999")])
    with pytest.raises(RecordMismatch):
        await store.append_output([OutputRange(KEY, 0, 2, (9, 1), b"9999811111")])
    stored = await store.load(KEY)
    assert stored is not None
    assert stored.output_token_ids == {0: (7, 8, 9), 1: (5,)}
    assert stored.output_logprobs == {0: b"777778888899999"}
    assert await store.load_live() == [stored]
    await discard(store, KEY)
    await store.replace_live([stored])
    assert await store.load(KEY) == stored
    await discard(store, KEY)


@pytest.mark.parametrize(
    "refused",
    [
        OutputRange(KEY, 0, 4, (9,)),  # a gap
        OutputRange(KEY, 0, 1, (9, 9)),  # another token than the stored one
        OutputRange(RequestKey("ann", "unknown"), 0, 0, (9,)),
    ],
)
async def test_output_that_does_not_continue_changes_nothing(
    store: Store, refused: OutputRange
) -> None:
    await write(store, record())
    await store.append_output([OutputRange(KEY, 0, 0, (7, 8))])
    with pytest.raises(RecordMismatch):
        await store.append_output([OutputRange(KEY, 0, 2, (9,)), refused])
    stored = await store.load(KEY)
    assert stored is not None
    assert stored.output_token_ids == {0: (7, 8)}
    await discard(store, KEY)


async def test_an_id_is_no_error_of_redis(store: Store) -> None:
    """Errors of scripts name requests. Retried as an outage, such a call would never end."""
    for name in ("OOM", "ASK", "MOVED", "READONLY", "LOADING"):
        with pytest.raises(RecordMismatch, match=name):
            await store.append_output([OutputRange(RequestKey(name, name), 0, 0, (7,))])


async def test_a_finished_record_expires_after_ten_minutes(
    store: Store, redis_client: redis.Redis
) -> None:
    await write(store, record())
    await store.append_output([OutputRange(KEY, 0, 0, (7,))])
    assert ttls(redis_client) == [-1, -1]
    await finish(
        store, [Ending(KEY, RequestState.FINISHED), Ending(OTHER_KEY, RequestState.FAILED)]
    )
    assert all(0 < ttl <= 600 for ttl in ttls(redis_client))
    assert await store.load(OTHER_KEY) is None
    await finish(store, [Ending(KEY, RequestState.CANCELLED, b"late", 9)], ttl_s=10_000)
    stored = await store.load(KEY)
    assert stored == StoredRequest(record(), RequestState.FINISHED, {0: (7,)})
    assert all(0 < ttl <= 600 for ttl in ttls(redis_client))
    await store.discard([record()])  # not live: stays
    assert await store.load(KEY) == stored
    with pytest.raises(RecordMismatch):
        await store.append_output([OutputRange(KEY, 0, 1, (8,))])


async def test_a_record_stores_how_its_request_ended(store: Store) -> None:
    await write(store, record())
    await finish(store, [Ending(KEY, RequestState.FAILED, b"\x08\x0d\x00", 48)])
    failed = StoredRequest(record(), RequestState.FAILED, {}, b"\x08\x0d\x00", 48)
    assert await store.load(KEY) == failed


async def test_ended_records_stay_below_their_limit_and_the_oldest_are_deleted(
    store: Store, redis_client: redis.Redis
) -> None:
    records = [record(RequestKey("ann", str(i)), i, opaque=bytes(9_400)) for i in range(20)]
    await write(store, *records, record(sequence_id=50))
    # Its id is used again, and ended again: it is as old as its last end.
    await finish(store, [Ending(records[0].key, RequestState.CANCELLED)])
    again = record(records[0].key, 60)
    await write(store, again)
    for ended in records[1:]:
        await finish(store, [Ending(ended.key, RequestState.FINISHED)], finished_max_bytes=55_000)
    kept = [ended for ended in records if await store.load(ended.key)]
    assert kept == [records[0], *records[15:]]  # about 10,000 bytes each
    assert [found.record for found in await store.load_live()] == [record(sequence_id=50), again]
    await finish(store, [Ending(KEY, RequestState.FINISHED)], finished_max_bytes=0)
    assert await store.load(KEY) is None
    assert not redis_client.exists(KEYS.ended)
    assert await store.load(records[19].key) is None
    await store.discard([again])


async def test_one_call_removes_a_bounded_number_of_ended_records(store: Store) -> None:
    records = [record(RequestKey("ann", str(i)), i) for i in range(100)]
    await write(store, *records)
    await finish(store, [Ending(r.key, RequestState.FINISHED) for r in records])
    await write(store, record())
    await finish(store, [Ending(KEY, RequestState.FINISHED)], finished_max_bytes=0)
    kept = [r for r in records if await store.load(r.key)]
    assert kept == records[20:]


async def test_the_list_of_ended_records_lives_as_long_as_the_last(
    store: Store, redis_client: redis.Redis
) -> None:
    await write(store, record(sequence_id=1), record(OTHER_KEY, 2))
    await finish(store, [Ending(KEY, RequestState.FINISHED)], ttl_s=1000)
    await finish(store, [Ending(OTHER_KEY, RequestState.FINISHED)], ttl_s=1)
    assert 1 < redis_client.ttl(KEYS.ended) <= 1000


async def test_the_live_ones_are_found_among_all(store: Store) -> None:
    records = [record(RequestKey(f"{i}/ä", "x:record"), 2**63 + i) for i in range(1200)]
    for start in range(0, 1200, 200):
        await write(store, *records[start : start + 200])
    await finish(store, [Ending(r.key, RequestState.FINISHED) for r in records[::2]])
    await store.append_output(
        [OutputRange(records[1].key, c, 0, (c, 2**32 - 1)) for c in (0, 10, 9, 2)]
    )
    output = {c: (c, 2**32 - 1) for c in (0, 2, 9, 10)}
    assert await store.load_live() == [
        StoredRequest(r, RequestState.LIVE, output if r is records[1] else {})
        for r in records[1::2]
    ]
    await store.replace_live([])
    assert await store.load_live() == []
    assert await store.load(records[0].key) is not None


async def test_a_leader_replaces_the_stored_requests(store: Store) -> None:
    """Lost writes: output is missing, a record too; an ended one is live."""
    ended, behind, unknown = (RequestKey("ann", name) for name in ("ended", "behind", "unknown"))
    await write(store, record(ended, 1), record(behind, 2))
    await store.append_output([OutputRange(behind, 1, 0, (5,))])
    ours = [
        StoredRequest(record(behind, 2), RequestState.LIVE, {0: (7, 8), 1: (5, 6)}),
        StoredRequest(record(unknown, 3, opaque=bytes(3 << 20)), RequestState.LIVE, {}),
        *(
            StoredRequest(record(RequestKey("bob", str(i)), 10 + i), RequestState.LIVE, {0: (i,)})
            for i in range(600)
        ),
    ]
    for _ in range(2):  # repeated, it changes nothing
        await store.replace_live(ours)
        assert await store.load_live() == ours
    assert await store.load(ended) is None
    await store.append_output([OutputRange(behind, 1, 2, (9,))])
    await store.replace_live([])


async def test_nothing_to_do_is_no_call(store: Store) -> None:
    assert await store.record([], []) == []
    await store.append_output([])
    await finish(store, [])
    await store.discard([])


def writes(store: Store) -> list[Coroutine[Any, Any, object]]:
    """Every call that changes request records, or removes requests that were given."""
    return [
        store.record([record(OTHER_KEY)], [False]),
        store.append_output([OutputRange(KEY, 0, 0, (7,))]),
        finish(store, [Ending(KEY, RequestState.FINISHED)]),
        store.discard([record()]),
        store.replace_live([StoredRequest(record(), RequestState.LIVE, {0: (1,)})]),
        store.trim_inbox([b"an entry"]),
    ]


async def test_an_earlier_leader_writes_no_records(store: Store, successor: Store) -> None:
    await write(successor, record())
    for refused in writes(store):
        with pytest.raises(StaleEpoch):
            await refused
    assert await successor.load_live() == [StoredRequest(record(), RequestState.LIVE, {})]
    await discard(successor, KEY)


@pytest.mark.parametrize("lost", ["entry", "last second"])
async def test_a_leader_whose_epoch_redis_has_lost_writes_no_records(
    store: Store, redis_client: redis.Redis, lost: str
) -> None:
    await write(store, record())
    if lost == "entry":
        redis_client.delete(KEYS.leadership)
    else:
        redis_client.hset(KEYS.leadership, mapping={"epoch": 1, "holder": store.leadership.holder})
    for refused in writes(store):
        with pytest.raises(LeadershipLost):
            await refused
    await store.lease.reacquire("first")
    assert await store.load_live() == [StoredRequest(record(), RequestState.LIVE, {})]
    await discard(store, KEY)


async def test_a_standby_writes_no_records(standby: Store) -> None:
    for refused in writes(standby):
        with pytest.raises(LeadershipLost):
            await refused


def test_keys_of_principals_and_ids_are_distinct() -> None:
    pairs = [("a/b", "c"), ("a", "b/c"), ("a}", "{c"), ("a", "}{c"), ("", "a"), ("a", "")]
    keys = {KEYS.request(*pair) for pair in pairs}
    assert len(keys) == len(pairs)
    assert all(key.count("{") == key.count("}") == 1 for both in keys for key in both)
