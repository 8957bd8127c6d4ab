"""How the coordinator hands shards over, one after another, by a clock that the tests move."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from scripted_cluster import ScriptedCluster, Written, beat, coordinator

from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.cluster.coordinator import JOIN_S, OFFER_AGAIN_S, Coordinator
from scheduler_svc.cluster.hand_overs import MAX_HAND_OVER_S
from scheduler_svc.cluster.heartbeats import HEARTBEAT_S
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.cluster.membership import Membership

NUM_SHARDS = 6
BUSY = ShardLoad(num_workers=1, num_live=3, num_gateways=2)


class Noted(Written):
    """The store, which also notes what a map gives."""

    def __init__(self, cluster: ScriptedCluster, leaders: Mapping[int, Membership]) -> None:
        super().__init__(cluster)
        self._leaders = leaders
        # By version of the map, the shards that it has given to others than their leaders.
        self.given: dict[int, set[int]] = {}

    async def write_map(self, packed: bytes) -> int:
        written_ms = await super().write_map(packed)
        self.given[self.map.version] = {
            shard for shard, owner in self.map.owners.items() if owner != self._leaders[shard].id
        }
        return written_ms


class Cluster:
    """Schedulers that lead shards with requests. A test says when a shard changes its leader."""

    def __init__(self) -> None:
        self.redis = ScriptedCluster()
        self.members = [self.redis.member(f"host-{number}") for number in range(2)]
        self.load = dict.fromkeys(range(NUM_SHARDS), BUSY)
        self.leaders: dict[int, Membership] = {}
        self.written = Noted(self.redis, self.leaders)
        self.given = self.written.given
        for shard in range(NUM_SHARDS):
            self.lead(shard, self.members[shard % 2])
        owners = {shard: member.id for shard, member in self.leaders.items()}
        self.redis.set_map(ClusterMap(1, NUM_SHARDS, owners))
        self.decides: Coordinator

    async def begin(self) -> None:
        """The first scheduler decides from now on."""
        await beat(*self.members, *self.members)
        self.decides = coordinator(self.members[0], self.written)

    @property
    def map(self) -> ClusterMap:
        return self.written.map

    def lead(self, shard: int, member: Membership) -> None:
        """The shard gets this leader, which serves it."""
        if shard in self.leaders:
            self.leaders[shard].stop_leading(shard)
        self.leaders[shard] = member
        member.lead(shard, lambda: replace(self.load[shard], leader=member.address))

    def take_given(self) -> set[int]:
        """Each shard that is given to another scheduler is led by it now; return these shards."""
        by_id = {member.id: member for member in self.members}
        taken = set()
        for shard, owner in self.map.owners.items():
            if owner in by_id and by_id[owner] is not self.leaders[shard]:
                self.lead(shard, by_id[owner])
                taken.add(shard)
        return taken

    def start(self) -> Membership:
        """A scheduler starts."""
        self.members.append(self.redis.member(f"host-{len(self.members)}"))
        return self.members[-1]

    def end(self, member: Membership) -> None:
        """A scheduler's process ends, and the others know."""
        self.members.remove(member)
        for other in self.members:
            other.mark_ended(member.address)

    def kill(self, member: Membership) -> None:
        """A scheduler's process ends. Those that are left lead its shards at once."""
        self.end(member)
        for shard, leader in list(self.leaders.items()):
            if leader is member:
                self.lead(shard, next(one for one in self.members if one.is_owner(shard)))

    async def tick(self) -> None:
        """A heartbeat of all, and a decision."""
        self.redis.now_s += HEARTBEAT_S
        await beat(*self.members, *self.members)
        await self.decides._update(None)

    async def tick_for(self, seconds: float) -> None:
        for _ in range(round(seconds / HEARTBEAT_S)):
            await self.tick()

    async def tick_until(self, condition: Callable[[], bool]) -> None:
        """At most as long as shards are not offered again."""
        for _ in range(round(OFFER_AGAIN_S / HEARTBEAT_S)):
            if condition():
                return
            await self.tick()
        raise AssertionError("nothing has changed")

    def num_led(self) -> list[int]:
        return [sum(led is member for led in self.leaders.values()) for member in self.members]


@pytest.fixture
async def cluster() -> Cluster:
    """Two schedulers with three shards each. A third one has joined, and is given the first."""
    cluster = Cluster()
    await cluster.begin()
    await cluster.tick()
    assert cluster.map.version == 1
    cluster.start()
    await cluster.tick_until(lambda: cluster.map.version == 2)
    return cluster


async def test_a_scheduler_that_joins_is_given_one_shard_after_another(cluster: Cluster) -> None:
    assert len(cluster.given[2]) == 1
    taken = []
    while len(taken) < 2:
        await cluster.tick_until(lambda: bool(cluster.take_given()))
        taken = [shard for shard, led in cluster.leaders.items() if led is cluster.members[2]]
        assert not cluster.given[cluster.map.version] - {*taken}, "one at a time"
    await cluster.tick_for(2 * OFFER_AGAIN_S)
    assert cluster.num_led() == [2, 2, 2]
    assert cluster.map.version == 3, "no shard is given twice"
    assert [len(shards) for shards in cluster.given.values()] == [1, 1]


async def test_the_next_one_waits_until_the_last_one_serves(cluster: Cluster) -> None:
    [shard] = cluster.given[2]
    # Its steps in flight are completed.
    await cluster.tick_for(MAX_HAND_OVER_S / 2)
    assert cluster.map.version == 2
    cluster.take_given()
    for load in (ShardLoad(), replace(BUSY, num_workers=0), replace(BUSY, num_gateways=1)):
        cluster.load[shard] = load
        await cluster.tick()
        assert cluster.map.version == 2
    cluster.load[shard] = BUSY
    await cluster.tick()
    assert cluster.map.version == 3


async def test_a_shard_that_does_not_serve_is_not_waited_for_forever(cluster: Cluster) -> None:
    """One of its gateways has ended, for example."""
    [shard] = cluster.given[2]
    cluster.take_given()
    cluster.load[shard] = replace(BUSY, num_gateways=1)
    await cluster.tick_for(MAX_HAND_OVER_S - HEARTBEAT_S)
    assert cluster.map.version == 2
    await cluster.tick()
    assert cluster.map.version == 3


async def test_a_scheduler_that_does_not_take_a_shard_gets_no_other(cluster: Cluster) -> None:
    third = cluster.members[2]
    await cluster.tick_for(OFFER_AGAIN_S - HEARTBEAT_S)
    assert cluster.map.version == 2
    # Others are not affected.
    fourth = cluster.start()
    await cluster.tick_until(lambda: fourth.id in cluster.map.owners.values())
    assert list(cluster.map.owners.values()).count(third.id) == 1


async def test_the_sequence_goes_on_when_the_scheduler_that_takes_ends(cluster: Cluster) -> None:
    third = cluster.members[2]
    cluster.start()
    cluster.take_given()
    cluster.kill(third)
    for _ in range(3):
        await cluster.tick_for(JOIN_S)
        cluster.take_given()
    assert cluster.num_led() == [2, 2, 2]
    assert all(len(shards) <= 1 for shards in cluster.given.values())


async def test_the_sequence_goes_on_when_the_coordinator_ends(cluster: Cluster) -> None:
    first = cluster.members[0]
    cluster.take_given()
    cluster.kill(first)
    cluster.decides = coordinator(cluster.leaders[0], cluster.written)
    for _ in range(3):
        await cluster.tick_for(JOIN_S)
        cluster.take_given()
    assert cluster.num_led() == [3, 3]


async def test_shards_of_a_scheduler_that_has_ended_are_given_at_once(cluster: Cluster) -> None:
    await cluster.tick_until(lambda: bool(cluster.take_given()))
    await cluster.tick_until(lambda: bool(cluster.take_given()))
    await cluster.tick()
    version, second = cluster.map.version, cluster.members[1]
    lost = {shard for shard, led in cluster.leaders.items() if led is second}
    assert len(lost) == 2
    cluster.end(second)
    await cluster.decides._update(None)
    assert cluster.map.version == version + 1
    assert second.id not in cluster.map.owners.values()


async def test_shards_without_requests_are_given_together() -> None:
    cluster = Cluster()
    cluster.load = dict.fromkeys(range(NUM_SHARDS), replace(BUSY, num_live=0))
    await cluster.begin()
    cluster.start()
    await cluster.tick_until(lambda: cluster.map.version == 2)
    assert len(cluster.given[2]) == 2


async def test_shard_0_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator moves with it."""
    cluster = Cluster()
    for shard in range(NUM_SHARDS):
        cluster.lead(shard, cluster.members[0])
    owners = dict.fromkeys(range(NUM_SHARDS), cluster.members[0].id)
    cluster.redis.set_map(ClusterMap(2, NUM_SHARDS, owners))
    await cluster.begin()
    plan = ClusterMap(2, NUM_SHARDS, dict.fromkeys(range(NUM_SHARDS), cluster.members[1].id))
    monkeypatch.setattr(ClusterMap, "next", lambda *args: plan)
    order: list[int] = []
    for _ in range(NUM_SHARDS):
        await cluster.tick()
        order += cluster.take_given()
    assert order == [1, 2, 3, 4, 5, 0]
