"""Request records: written, folded, ended, and gone in time."""

import pytest
import redis

from scheduler_svc.store.errors import RequestFault, StaleEpoch
from scheduler_svc.store.keys import request_keys
from scheduler_svc.store.requests import (
    Ending,
    OutputRun,
    RequestKey,
    RequestRecord,
    RequestState,
    StoredRequest,
)
from scheduler_svc.store.store import Store

KEY = RequestKey("ann", "r-1")
OTHER_KEY = RequestKey("", "r-1")


def record(key: RequestKey = KEY, sequence_id: int = 2**64 - 1, **given: object) -> RequestRecord:
    fields: dict[str, object] = {
        "digest": b"\x00digest\xff",
        "prompt_token_ids": (1, 2**32 - 1),
        "params": b"\x08\x00",
    }
    return RequestRecord(key=key, sequence_id=sequence_id, **{**fields, **given})


def ttls(client: redis.Redis, key: RequestKey = KEY) -> list[int]:
    return [client.ttl(name) for name in request_keys(key.principal, key.request_id)]


async def test_a_record_comes_back_as_it_was_written(store: Store) -> None:
    full = record(deadline_ms=1_900_000_000_000, opaque=b"\x00\x01")
    bare = record(OTHER_KEY, 5, prompt_token_ids=())
    assert await store.record([full, bare]) == [True, True]
    assert await store.load(KEY) == StoredRequest(full, RequestState.LIVE, {})
    assert await store.load(OTHER_KEY) == StoredRequest(bare, RequestState.LIVE, {})
    assert await store.load(RequestKey("ann", "r-2")) is None
    await store.discard([KEY, OTHER_KEY])
    assert await store.load(KEY) is None


async def test_a_live_id_is_refused_and_only_that(store: Store) -> None:
    await store.record([record(sequence_id=1)])
    again = [record(sequence_id=2), record(OTHER_KEY, 3), record(OTHER_KEY, 4)]
    assert await store.record(again) == [False, True, False]
    stored = await store.load(KEY)
    assert stored is not None
    assert stored.record.sequence_id == 1
    # The same call once more, after a lost connection, is not taken for another request.
    assert await store.record(again) == [False, True, False]
    await store.discard([KEY, OTHER_KEY])


async def test_output_is_folded_once(store: Store) -> None:
    await store.record([record(), record(OTHER_KEY, 2)])
    await store.fold([OutputRun(KEY, 0, 0, (7, 8)), OutputRun(OTHER_KEY, 0, 0, (1,))])
    await store.fold([OutputRun(KEY, 0, 2, (9,)), OutputRun(KEY, 0, 3, (10,))])
    await store.fold([OutputRun(KEY, 0, 1, (8, 9, 10, 2**32 - 1)), OutputRun(OTHER_KEY, 0, 0, ())])
    await store.fold([OutputRun(OTHER_KEY, 3, 0, (5,)), OutputRun(OTHER_KEY, 3, 1, (6,))])
    stored = await store.load(KEY)
    assert stored is not None
    assert stored.output_token_ids == {0: (7, 8, 9, 10, 2**32 - 1)}
    other = await store.load(OTHER_KEY)
    assert other is not None
    assert other.output_token_ids == {0: (1,), 3: (5, 6)}
    await store.discard([KEY, OTHER_KEY])


@pytest.mark.parametrize(
    "run",
    [
        OutputRun(KEY, 0, 4, (9,)),  # a gap
        OutputRun(KEY, 0, 1, (9, 9)),  # another token than the stored one
        OutputRun(RequestKey("ann", "unknown"), 0, 0, (9,)),
    ],
)
async def test_a_run_that_does_not_continue_changes_nothing(store: Store, run: OutputRun) -> None:
    await store.record([record()])
    await store.fold([OutputRun(KEY, 0, 0, (7, 8))])
    with pytest.raises(RequestFault):
        await store.fold([OutputRun(KEY, 0, 2, (9,)), run])
    stored = await store.load(KEY)
    assert stored is not None
    assert stored.output_token_ids == {0: (7, 8)}
    await store.discard([KEY])


async def test_a_finished_record_lives_ten_minutes(store: Store, redis_client: redis.Redis) -> None:
    await store.record([record()])
    await store.fold([OutputRun(KEY, 0, 0, (7,))])
    assert ttls(redis_client) == [-1, -1]
    await store.finish([Ending(KEY, RequestState.FINISHED), Ending(OTHER_KEY, RequestState.FAILED)])
    assert all(0 < ttl <= 600 for ttl in ttls(redis_client))
    assert await store.load(OTHER_KEY) is None
    await store.finish([Ending(KEY, RequestState.CANCELLED)], ttl_s=10_000)
    stored = await store.load(KEY)
    assert stored is not None
    assert stored.state == RequestState.FINISHED
    assert all(0 < ttl <= 600 for ttl in ttls(redis_client))
    await store.discard([KEY])  # not live: stays
    assert await store.load(KEY) == stored
    with pytest.raises(RequestFault):
        await store.fold([OutputRun(KEY, 0, 1, (8,))])


async def test_a_finished_id_may_be_used_again(store: Store, redis_client: redis.Redis) -> None:
    await store.record([record(opaque=b"first")])
    await store.fold([OutputRun(KEY, 0, 0, (7,))])
    await store.finish([Ending(KEY, RequestState.FINISHED)])
    assert await store.record([record(sequence_id=3)]) == [True]
    assert await store.load(KEY) == StoredRequest(record(sequence_id=3), RequestState.LIVE, {})
    assert ttls(redis_client) == [-1, -2]
    await store.discard([KEY])


async def test_nothing_to_do_is_no_call(store: Store) -> None:
    assert await store.record([]) == []
    await store.fold([])
    await store.finish([])
    await store.discard([])


async def test_a_former_leader_writes_no_records(store: Store, redis_url: str) -> None:
    await store.record([record()])
    successor = await Store.connect(redis_url)
    for refused in (
        store.record([record(OTHER_KEY)]),
        store.fold([OutputRun(KEY, 0, 0, (7,))]),
        store.finish([Ending(KEY, RequestState.FINISHED)]),
        store.discard([KEY]),
    ):
        with pytest.raises(StaleEpoch):
            await refused
    await successor.discard([KEY])
    await successor.close()


def test_principals_and_ids_do_not_run_into_each_other() -> None:
    pairs = [("a/b", "c"), ("a", "b/c"), ("a}", "{c"), ("a", "}{c"), ("", "a"), ("a", "")]
    keys = {request_keys(*pair) for pair in pairs}
    assert len(keys) == len(pairs)
    assert all(key.count("{") == key.count("}") == 1 for both in keys for key in both)
