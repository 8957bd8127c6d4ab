"""Requests that one shard has given to another: they are removed once they were read."""

from array import array

from scheduler_svc.store.inbox import HEAD_BYTES, Moved
from scheduler_svc.store.requests import RequestKey, RequestRecord, RequestState, StoredRequest
from scheduler_svc.store.store import Store


def moved(name: str, is_cancelled: bool = False) -> Moved:
    record = RequestRecord(
        RequestKey("", name), b"digest", array("I", [1, 2, 3]), b"params", sequence_id=1
    )
    return Moved(StoredRequest(record, RequestState.LIVE, {}), is_cancelled)


def test_an_entry_is_read_as_it_was_written() -> None:
    for is_cancelled in (False, True):
        read = Moved.parse(moved("x", is_cancelled).pack())
        assert read.is_cancelled == is_cancelled
        assert read.request.record.key == RequestKey("", "x")
        assert list(read.request.record.prompt_token_ids) == [1, 2, 3]
    assert moved("x").pack()[:HEAD_BYTES] != moved("x").pack()[:HEAD_BYTES]


async def test_a_repeated_call_removes_no_entry_that_was_not_read(store: Store) -> None:
    first, *others = [moved(name).pack() for name in ("x", "x", "x", "y")]
    await store.put_in_inbox([first, others[0]])
    taken = await store.read_inbox(64)
    assert taken == [first, others[0]]
    # Also of a request that was read: it may have ended meanwhile, and be given again.
    await store.put_in_inbox(others[1:])
    for _ in range(3):
        await store.trim_inbox(taken)
        assert await store.read_inbox(64) == others[1:]
    await store.trim_inbox(others)
    assert await store.read_inbox(64) == others[1:], "it begins with another one"
    await store.trim_inbox(others[1:])
    assert not await store.read_inbox(64)


async def test_entries_of_no_version_are_removed_as_they_were_read(store: Store) -> None:
    unreadable, entry = [b"", b"+", b"", b"\xff" * 40], moved("x").pack()
    await store.put_in_inbox(unreadable)
    taken = await store.read_inbox(64)
    await store.put_in_inbox([entry])
    for _ in range(2):
        await store.trim_inbox(taken)
        assert await store.read_inbox(64) == [entry]
    await store.trim_inbox([entry])
