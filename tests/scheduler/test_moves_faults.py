"""What happens to requests that move when something fails or changes in between."""

import asyncio
import contextlib
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
from waiting import until

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.core.request import SequenceIds
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.engine.moves import Moves
from scheduler_svc.engine.record_conversion import from_record, group_of, to_record
from scheduler_svc.store.errors import NoReply, StoreUnavailable
from scheduler_svc.store.inbox import Moved
from scheduler_svc.store.requests import RecordOutcome, RequestKey, RequestRecord


class Engine:
    """A queue in which all wait."""

    def __init__(self, groups: list[Group]) -> None:
        self.live = {group.key: group for group in groups}
        self.lanes: dict[int, object] = {1: object()}
        self.waiting = self
        self.output_model = b""
        self.sequence_ids = SequenceIds(epoch=1)

    def first(self, count: int) -> list[Sequence]:
        waiting = [one for group in self.live.values() for one in group.sequences]
        return [one for one in waiting if one.lane_incarnation is None][:count]

    def withdraw(self, group: Group) -> None:
        assert group.sequences[0].lane_incarnation is None, "it runs here"
        del self.live[group.key]

    def return_withdrawn(self, group: Group, output_model: bytes) -> None:
        self.live[group.key] = group

    def adopt(self, group: Group) -> None:
        self.live[group.key] = group


class Redis:
    """The store of a shard: the records of live requests by sequence ids, and the inbox."""

    def __init__(self) -> None:
        self.inbox: list[bytes] = []
        self.records: dict[RequestKey, int] = {}
        # Calls of `record` that execute, and have no reply; and those of `put_in_inbox`.
        self.num_lost_replies = self.num_lost_puts = 0
        self.when_given = lambda: None

    async def model(self) -> bytes:
        return b""

    async def put_in_inbox(self, packed: list[bytes]) -> None:
        await asyncio.sleep(0)
        self.inbox += packed
        self.when_given()
        if self.num_lost_puts:
            self.num_lost_puts -= 1
            raise NoReply("no reply")

    async def read_inbox(self, count: int) -> list[bytes]:
        return self.inbox[:count]

    async def trim_inbox(self, packed: list[bytes]) -> None:
        assert self.inbox[: len(packed)] == packed
        del self.inbox[: len(packed)]

    async def record(self, records: list[RequestRecord], again: list[bool]) -> list[RecordOutcome]:
        [record] = records
        first_id = self.records.setdefault(record.key, record.sequence_id)
        if self.num_lost_replies:
            self.num_lost_replies -= 1
            raise StoreUnavailable("no reply")
        is_same = first_id == record.sequence_id
        return [RecordOutcome.NEW if is_same else RecordOutcome.EXISTS]


class Writer:
    def discard(self, records: object) -> None:
        pass

    async def sync(self, keys: set[RequestKey]) -> None:
        pass

    async def compact(self, sequences: list[Sequence]) -> None:
        await asyncio.sleep(0)
        for sequence in sequences:
            sequence.num_recorded = sequence.num_journaled


class Claims:
    is_needed = True
    is_failing = False

    async def give(self, keys: list[RequestKey], shard: int) -> None:
        if self.is_failing:
            raise StoreUnavailable("no directory")


def request(name: str, num_tokens: int = 2) -> RequestRecord:
    params = scheduler_pb2.ResolvedParams(max_tokens=4).SerializeToString()
    prompt = array("I", range(num_tokens))
    return RequestRecord(RequestKey("", name), b"", prompt, params, sequence_id=1)


class Cluster:
    """Shard 0 has a queue; two others have room for one request each."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.claims = engine, Claims()
        self.is_leading = True
        self.stores = [Redis() for _ in range(3)]
        self.known_stores = dict(enumerate(self.stores))
        self.given: list[str] = []
        self.taken: list[str] = []
        loads = [
            ShardLoad("a", 1, 0, 2, 2),
            ShardLoad("b", 1, 1, 0, 0, num_free_tokens=4),
            ShardLoad("c", 1, 1, 0, 0, num_free_tokens=2),
        ]
        self.moves = Moves(
            0,
            SimpleNamespace(loads=loads, map=SimpleNamespace(num_shards=3)),
            engine,
            self.stores[0],
            self.known_stores,
            Writer(),
            self.claims,
            lambda: self.is_leading,
            lambda group, shard: self.given.append(group.key.request_id),
            lambda group: self.taken.append(group.key.request_id),
        )  # type: ignore[arg-type]

    async def run_until_given(self, count: int) -> None:
        running = asyncio.create_task(self.moves.run())
        await until(lambda: len(self.given) >= count, "requests that are given")
        running.cancel()

    async def run_for(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.moves.run()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr("scheduler_svc.engine.moves.HEARTBEAT_S", 0.01)
    return Cluster(Engine([group_of(request(name)) for name in "xy"]))


async def test_a_request_that_gets_a_row_while_others_are_given_stays(cluster: Cluster) -> None:
    def start_last() -> None:
        for group in cluster.engine.live.values():
            group.sequences[0].lane_incarnation = 1

    cluster.stores[1].when_given = start_last
    await cluster.run_until_given(1)
    await cluster.run_for(0.1)
    assert cluster.given == ["x"]
    assert [key.request_id for key in cluster.engine.live] == ["y"]


async def test_a_request_for_which_no_other_shard_has_blocks_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait there, too, and be given back."""
    monkeypatch.setattr("scheduler_svc.engine.moves.HEARTBEAT_S", 0.01)
    long = [group_of(request(name, num_tokens)) for name, num_tokens in (("x", 5), ("y", 3))]
    cluster = Cluster(Engine(long))
    await cluster.run_until_given(1)
    await cluster.run_for(0.1)
    assert cluster.given == ["y"]
    assert not cluster.stores[2].inbox
    # Without a worker here it waits no longer anywhere else.
    cluster.engine.lanes.clear()
    await cluster.run_until_given(2)
    assert cluster.given == ["y", "x"]


async def test_output_is_in_the_record_before_a_request_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What compacts the journal of its lost lane later finds nothing to write."""
    monkeypatch.setattr("scheduler_svc.engine.moves.HEARTBEAT_S", 0.01)
    stored = to_record(group_of(request("x")))
    group = from_record(replace(stored, output_token_ids={0: [7]}), {})
    [sequence] = group.sequences
    sequence.num_recorded = 0
    cluster = Cluster(Engine([group]))
    cluster.engine.lanes.clear()
    recorded: list[int] = []
    cluster.stores[1].when_given = lambda: recorded.append(sequence.num_recorded)
    await cluster.run_until_given(1)
    assert recorded[0] == sequence.num_journaled == 1


async def test_gateways_follow_requests_whose_ids_cannot_be_claimed(cluster: Cluster) -> None:
    cluster.claims.is_failing = True
    await cluster.run_until_given(2)
    assert cluster.given == ["x", "y"]
    assert not cluster.engine.live


async def test_a_leader_that_may_have_been_replaced_moves_nothing(cluster: Cluster) -> None:
    cluster.is_leading = False
    cluster.stores[0].inbox = [Moved(to_record(group_of(request("z")))).pack()]
    await cluster.run_for(0.1)
    assert not cluster.given
    assert not cluster.taken
    cluster.stores[0].inbox.clear()
    cluster.is_leading = True

    def expire() -> None:
        cluster.is_leading = False

    cluster.stores[1].when_given = expire
    await cluster.run_until_given(1)
    await cluster.run_for(0.1)
    assert cluster.given == ["x"]
    assert [len(store.inbox) for store in cluster.stores] == [0, 1, 0]


@pytest.mark.parametrize("error", [StoreUnavailable, RuntimeError])
async def test_a_request_that_cannot_be_given_stays(cluster: Cluster, error, monkeypatch) -> None:
    async def fail(packed: list[bytes]) -> None:
        raise error

    monkeypatch.setattr(cluster.stores[1], "put_in_inbox", fail)
    # An outage is waited for.
    expected = TimeoutError if error is StoreUnavailable else error
    with pytest.raises(expected):
        async with asyncio.timeout(0.1 if error is StoreUnavailable else 10):
            await cluster.moves.run()
    assert {key.request_id for key in cluster.engine.live} == {"x", "y"}
    assert not cluster.given


async def test_a_request_stays_if_the_term_ends_while_it_is_given(
    cluster: Cluster, monkeypatch
) -> None:
    is_giving = asyncio.Event()

    async def hang(packed: list[bytes]) -> None:
        is_giving.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster.stores[1], "put_in_inbox", hang)
    running = asyncio.create_task(cluster.moves.run())
    async with asyncio.timeout(10):
        await is_giving.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {key.request_id for key in cluster.engine.live} == {"x", "y"}


def names_in(inbox: list[bytes]) -> list[str]:
    return [Moved.parse(packed).request.record.key.request_id for packed in inbox]


async def test_a_request_that_may_have_been_given_is_given_again_and_runs_once(
    cluster: Cluster,
) -> None:
    inbox = cluster.stores[1].inbox
    cluster.stores[1].num_lost_puts = 2
    live: list[str] = []
    cluster.stores[1].when_given = lambda: live.extend(
        key.request_id for key in cluster.engine.live
    )
    await cluster.run_until_given(2)
    assert cluster.given == ["x", "y"]
    assert "x" not in live, "it does not run here meanwhile"
    # The other shard takes it once.
    other = Cluster(Engine([]))
    assert names_in(inbox) == ["x"] * 3
    other.stores[0].inbox = inbox
    await other.moves.take()
    assert other.taken == ["x"]


async def test_nothing_is_given_again_while_the_lease_may_have_expired(cluster: Cluster) -> None:
    other = cluster.stores[1]
    other.num_lost_puts = 1

    def expire() -> None:
        cluster.is_leading = False

    other.when_given = expire
    running = asyncio.create_task(cluster.moves.run())
    await until(lambda: other.inbox, "the first attempt")
    await asyncio.sleep(0.05)
    assert names_in(other.inbox) == ["x"]
    assert [key.request_id for key in cluster.moves.giving] == ["x"]
    other.when_given = lambda: None
    cluster.is_leading = True
    await until(lambda: cluster.given == ["x", "y"], "the moves")
    running.cancel()
    assert names_in(other.inbox) == ["x"] * 2


async def test_a_request_stays_if_only_the_other_shards_part_of_redis_is_silent(
    cluster: Cluster, monkeypatch
) -> None:
    """The other leader takes nothing then, either."""
    monkeypatch.setattr("scheduler_svc.engine.moves.REPEAT_S", 0.05)
    other = cluster.stores[1]
    other.num_lost_puts = 1000
    returned: list[str] = []
    monkeypatch.setattr(
        cluster.engine, "return_withdrawn", lambda group, _: returned.append(group.key.request_id)
    )
    running = asyncio.create_task(cluster.moves.run())
    await until(lambda: returned, "a return")
    running.cancel()
    assert returned == ["x"]
    assert not cluster.given
    assert len(other.inbox) > 1


async def test_a_shard_that_was_just_added_gets_nothing_yet(cluster: Cluster) -> None:
    added = cluster.known_stores.pop(1)
    await cluster.run_until_given(1)
    await cluster.run_for(0.1)
    assert cluster.given == ["x"]
    assert [len(store.inbox) for store in cluster.stores] == [0, 0, 1]
    cluster.known_stores[1] = added
    await cluster.run_until_given(2)
    assert cluster.given == ["x", "y"]


async def test_a_request_is_taken_after_a_lost_reply(cluster: Cluster) -> None:
    cluster.stores[0].inbox = [Moved(to_record(group_of(request("z")))).pack()]
    cluster.stores[0].num_lost_replies = 1
    with pytest.raises(StoreUnavailable):
        await cluster.moves.take()
    await cluster.moves.take()
    assert cluster.taken == ["z"]
    assert not cluster.stores[0].inbox
