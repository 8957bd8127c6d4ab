"""How the leader of shard 0 decides the map, and which addresses of workers a shard gets by it."""

import asyncio
import contextlib

import pytest
from scripted_cluster import ScriptedCluster, Written, beat, coordinator
from waiting import until

from scheduler_svc.cluster import coordinator as coordinator_module
from scheduler_svc.cluster import membership as membership_module
from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.cluster.coordinator import JOIN_S, KEEP_WORKER_S, OFFER_AGAIN_S, Coordinator
from scheduler_svc.cluster.heartbeats import HEARTBEAT_S
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.cluster.worker_addresses import WorkerAddresses
from scheduler_svc.store.cluster import Timed
from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable


@pytest.fixture
def cluster() -> ScriptedCluster:
    return ScriptedCluster()


@pytest.fixture
def written(cluster: ScriptedCluster) -> Written:
    return Written(cluster)


@pytest.fixture
async def leader(cluster: ScriptedCluster) -> Membership:
    """That of shard 0's leader."""
    member = cluster.member("a")
    await beat(member)
    return member


async def nothing() -> None:
    pass


async def test_a_new_scheduler_gets_shards_when_it_has_run_for_a_while(
    cluster, written, leader
) -> None:
    decides = coordinator(leader, written)
    await decides.set_num_shards(2, nothing)
    assert written.map == ClusterMap(1, 2, {0: leader.id, 1: leader.id})
    second = cluster.member("b")
    await beat(second, leader)
    for _ in range(round(JOIN_S / HEARTBEAT_S)):
        await decides._update(None)
        assert set(written.map.owners.values()) == {leader.id}
        cluster.now_s += HEARTBEAT_S
        await beat(second, leader)
    await decides._update(None)
    assert sorted(written.map.owners.values()) == sorted([leader.id, second.id])
    # It ends, and its successor waits as long.
    second.leave()
    third = cluster.member("b")
    await beat(second, third, leader)
    await decides._update(None)
    assert set(written.map.owners.values()) == {leader.id}
    cluster.now_s += JOIN_S - HEARTBEAT_S
    await beat(third, leader)
    await decides._update(None)
    assert set(written.map.owners.values()) == {leader.id}


async def test_a_scheduler_that_takes_over_just_after_its_start_keeps_the_shards(
    cluster, written, leader
) -> None:
    """All schedulers expect the same one to take over. The map gives its shards to no other one."""
    second = cluster.member("b")
    owners = {0: leader.id, 1: leader.id, 2: second.id, 3: second.id}
    cluster.set_map(ClusterMap(3, 4, owners))
    for shard, owner in owners.items():
        member = leader if owner == leader.id else second
        member.lead(shard, lambda member=member: ShardLoad(member.address, 1, 1, 3))
    await beat(second, leader)
    decides = coordinator(leader, written)
    third = cluster.member("c")
    await beat(third, leader)
    for member in (leader, third):
        member.mark_ended("b")
    taken = [shard for shard in (2, 3) if third.is_owner(shard)]
    assert taken == [2, 3], "it has the fewest"
    await decides._update(None)
    assert [shard for shard in written.map.owners if written.map.owners[shard] == third.id] == taken
    for shard in taken:
        third.lead(shard, lambda: ShardLoad("c", 1, 1, 3))
    await beat(third, leader)
    version = written.map.version
    await decides._update(None)
    assert written.map.version == version


async def test_a_scheduler_that_is_not_reached_gets_no_shard(cluster, written, leader) -> None:
    decides = coordinator(leader, written)
    await decides.set_num_shards(3, nothing)
    second, lost = cluster.member("b"), cluster.member("unreachable")
    for _ in range(round(2 * JOIN_S / HEARTBEAT_S)):
        await beat(second, lost, leader)
        await decides._update(None)
        cluster.now_s += HEARTBEAT_S
    assert set(written.map.owners.values()) == {leader.id, second.id}


async def test_schedulers_of_the_map_do_not_wait_under_the_next_leader(
    cluster, written, leader
) -> None:
    second = cluster.member("b")
    cluster.set_map(ClusterMap(3, 2, {0: second.id, 1: leader.id}))
    second.lead(1, lambda: ShardLoad("b"))
    await beat(second, leader)
    cluster.now_s += OFFER_AGAIN_S
    await beat(second, leader)
    await coordinator(leader, written)._update(None)
    # Shard 0 is led by the one that decides, whatever the map says.
    assert written.map == ClusterMap(4, 2, {0: leader.id, 1: second.id})


async def test_a_shard_stays_with_the_scheduler_that_leads_it(cluster, written, leader) -> None:
    second, third = cluster.member("b"), cluster.member("c")
    owners = {0: leader.id, 1: second.id, 2: third.id}
    cluster.set_map(ClusterMap(3, 3, owners))
    # They lead each other's, which is as even.
    second.lead(2, lambda: ShardLoad("b"))
    third.lead(1, lambda: ShardLoad("c"))
    await beat(second, third, leader)
    cluster.now_s += OFFER_AGAIN_S
    await beat(second, third, leader)
    await coordinator(leader, written)._update(None)
    assert written.map.owners == {0: leader.id, 1: third.id, 2: second.id}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("names", ["abc", "bac"])
async def test_shards_are_given_back_by_one_decision(
    cluster, written, monkeypatch, first: int, names: str
) -> None:
    """Hand-overs take a while, each its own. The plan stays the same in between."""
    ids = iter(names)
    monkeypatch.setattr(membership_module.secrets, "token_hex", lambda size: next(ids))
    members = [cluster.member(f"host-{number}") for number in range(3)]
    leaders = dict.fromkeys(range(4), members[0]) | dict.fromkeys(range(4, 7), members[1])
    for shard, member in leaders.items():
        member.lead(shard, lambda member=member: ShardLoad(member.address))
    cluster.set_map(ClusterMap(3, 7, {shard: member.id for shard, member in leaders.items()}))
    await beat(*members, *members)
    decides = coordinator(members[0], written)
    for _ in range(round(JOIN_S / HEARTBEAT_S)):
        await decides._update(None)
        cluster.now_s += HEARTBEAT_S
        await beat(*members)
    await decides._update(None)
    [planned] = {written.map.version} - {3}
    given = [shard for shard, owner in written.map.owners.items() if owner == members[2].id]
    assert len(given) == 2
    for shard in sorted(given, reverse=bool(first)):
        leaders[shard].stop_leading(shard)
        members[2].lead(shard, lambda: ShardLoad(members[2].address))
        cluster.now_s += HEARTBEAT_S
        await beat(*members, *members)
        if shard == 0:
            # The next leader knows what the last one has begun.
            decides = coordinator(members[2], written)
        await decides._update(None)
        assert written.map.version == planned


async def test_a_scheduler_that_returns_gets_what_was_taken_over(cluster, written, leader) -> None:
    """The coordinator's own shard was led before, whatever the ids."""
    second = cluster.member("b")
    epochs = {0: 10, 1: 30, 2: 11, 3: 31}
    for shard, epoch in epochs.items():
        leader.lead(shard, lambda epoch=epoch: ShardLoad("a", 1, 1, 3, 0, 0, 1, epoch))
    cluster.set_map(ClusterMap(3, 4, dict.fromkeys(epochs, leader.id)))
    await beat(second, leader)
    decides = coordinator(leader, written)
    for _ in range(round(JOIN_S / HEARTBEAT_S)):
        await decides._update(None)
        cluster.now_s += HEARTBEAT_S
        await beat(second, leader)
    await decides._update(None)
    # One at a time.
    assert written.map.owners == {0: leader.id, 1: second.id, 2: leader.id, 3: leader.id}
    leader.stop_leading(1)
    second.lead(1, lambda: ShardLoad("b", 1, 1, 3, 0, 0, 1, 40))
    await beat(second, leader)
    await decides._update(None)
    assert written.map.owners == {0: leader.id, 1: second.id, 2: leader.id, 3: second.id}


async def test_a_shard_that_its_owner_has_not_taken_is_offered_again(
    cluster, written, leader
) -> None:
    second = cluster.member("b")
    cluster.set_map(ClusterMap(3, 2, {0: leader.id, 1: second.id}))
    leader.lead(1, lambda: ShardLoad("a"))
    await beat(second, leader)
    cluster.now_s += OFFER_AGAIN_S
    await beat(second, leader)
    decides = coordinator(leader, written)
    await decides._update(None)
    version = leader.map.version
    # Of two shards of one leader either may be given away.
    given = next(shard for shard, owner in leader.map.owners.items() if owner == second.id)
    leader.lead(given, lambda: ShardLoad("a"))
    cluster.now_s += OFFER_AGAIN_S - HEARTBEAT_S
    await beat(second, leader)
    await decides._update(None)
    assert leader.map.version == version
    cluster.now_s += HEARTBEAT_S
    await beat(second, leader)
    await decides._update(None)
    assert leader.map.version == version + 1
    assert leader.map.owners[given] == second.id
    assert not leader.should_hand_over(given, led_since=version)
    cluster.now_s += HEARTBEAT_S
    await beat(second, leader)
    assert leader.should_hand_over(given, led_since=version)
    await decides._update(None)
    assert leader.map.version == version + 1
    # Nothing is offered to one that has ended.
    second.leave()
    await beat(second, leader)
    cluster.now_s += OFFER_AGAIN_S
    await beat(leader)
    await decides._update(None)
    assert set(leader.map.owners.values()) == {leader.id}


async def test_a_leader_that_drains_gives_its_shards_away(cluster, written, leader) -> None:
    second = cluster.member("b")
    cluster.set_map(ClusterMap(3, 2, {0: leader.id, 1: second.id}))
    await beat(second, leader)
    decides = coordinator(leader, written)
    leader.leave()
    await decides._update(None)
    assert written.map.owners == {0: second.id, 1: second.id}
    # After the last one there is no scheduler to give them to.
    second.leave()
    await beat(second, leader)
    await decides._update(None)
    assert written.map.owners == {}


async def test_a_worker_keeps_its_shard_while_its_name_does_not_resolve(
    cluster, written, leader
) -> None:
    decides = coordinator(leader, written)
    written.all = frozenset({"x:1", "y:1"})
    await decides.set_num_shards(2, nothing)
    before = written.map.workers
    assert sorted(before.values()) == [0, 1]
    written.all = frozenset({"x:1"})
    cluster.now_s += HEARTBEAT_S
    await decides._update(None)
    cluster.now_s += KEEP_WORKER_S - 2 * HEARTBEAT_S
    await decides._update(None)
    assert written.map.workers == before
    # Under the next leader it is kept as long again.
    following = coordinator(leader, written)
    cluster.now_s += HEARTBEAT_S
    await decides._update(None)
    assert written.map.workers == {"x:1": before["x:1"]}
    following_map = ClusterMap(leader.map.version + 1, 2, leader.map.owners, before)
    leader.set_map(following_map, cluster.now_ms)
    await following._update(None)
    assert leader.map.workers == before


async def test_the_map_is_written_at_first_and_again_after_lost_writes(
    cluster, written, leader, monkeypatch
) -> None:
    monkeypatch.setattr(coordinator_module, "HEARTBEAT_S", 0.001)
    cluster.set_map(ClusterMap(7, 2, {0: leader.id, 1: leader.id}))
    await beat(leader)
    cluster.map = None
    async with running(coordinator(leader, written)):
        await until(lambda: cluster.map is not None, "the map")
        assert written.map.version == 7
        assert written.num_writes == 1
        # Nothing changes until a call has failed: it may have been lost, too.
        written.error = StoreUnavailable("no connection")
        written.all = frozenset({"x:1"})
        cluster.map = None
        await until(lambda: leader.map.version == 7, "a failure")
        written.error = None
        await until(lambda: cluster.map is not None, "the map")
    assert list(written.map.workers) == ["x:1"]
    assert written.map.version == 8


@pytest.mark.parametrize("following", [{"x:0", "x:2"}, {"x:0"}], ids=["another one", "as before"])
async def test_a_map_after_one_without_a_reply_is_newer(
    cluster, written, leader, following
) -> None:
    """Redis may have written the map whose reply was lost, and others may have read it."""
    written.all = frozenset({"x:0"})
    decides = coordinator(leader, written)
    await decides.set_num_shards(2, nothing)
    other = cluster.member("b")
    written.all = frozenset({"x:1"})
    written.is_silent = True
    with pytest.raises(StoreUnavailable):
        await decides._update(None)
    await beat(other)
    assert other.map.workers.keys() == {"x:0", "x:1"}
    # The names of workers do not keep the last ones any more.
    cluster.now_s += KEEP_WORKER_S
    written.is_silent = False
    written.all = following
    await decides._update(None)
    await beat(other)
    assert other.map == leader.map == written.map
    assert other.map.workers.keys() == following


async def test_a_map_that_was_lost_is_replaced_by_one_that_others_take(
    cluster, written, leader, monkeypatch
) -> None:
    monkeypatch.setattr(coordinator_module, "HEARTBEAT_S", 0.001)
    other = cluster.member("b")
    cluster.set_map(ClusterMap(7, 3))
    await beat(other)
    cluster.map = b"broken"
    cluster.loads = {2: Timed(0, b"old")}
    await beat(leader)
    async with running(coordinator(leader, written)):
        await until(lambda: cluster.map != b"broken", "the map")
    assert written.map.num_shards == 3
    await beat(other)
    assert other.map == written.map


async def test_a_leader_of_shard_0_that_was_replaced_ends(cluster, written, leader) -> None:
    written.error = StaleEpoch("another one leads")
    with pytest.raises(StaleEpoch):
        await coordinator(leader, written).run()


async def test_the_number_of_shards_rises_after_the_preparation(written, leader) -> None:
    decides = coordinator(leader, written)
    prepared = []

    async def prepare() -> None:
        prepared.append(leader.map.num_shards)

    await decides.set_num_shards(4, prepare)
    assert (prepared, leader.map.num_shards, written.map.num_shards) == ([1], 4, 4)
    for number in (4, 2):
        await decides.set_num_shards(number, prepare)
    assert (prepared, leader.map.num_shards) == ([1], 4)

    async def fail() -> None:
        raise StoreUnavailable("no connection")

    with pytest.raises(StoreUnavailable):
        await decides.set_num_shards(8, fail)
    assert leader.map.num_shards == 4


@contextlib.asynccontextmanager
async def running(decides: Coordinator):
    task = asyncio.create_task(decides.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_a_shard_gets_its_workers_by_the_map(leader: Membership) -> None:
    names = ("unix:/a", "unix:/b", "unix:/new")
    addresses = WorkerAddresses(names, leader)
    changes = []
    addresses.listen(lambda: changes.append(leader.map.version))
    # A single shard has all workers, before any map.
    assert addresses.of(0) == addresses.all == {*names}
    assert not addresses.is_elsewhere("unix:/a", 0)
    workers = {"unix:/a": 0, "unix:/b": 1, "unix:/absent": 0}
    leader.set_map(ClusterMap(1, 2, {}, workers), leader.now_ms)
    assert [addresses.of(shard) for shard in (0, 1)] == [{"unix:/a"}, {"unix:/b"}]
    assert addresses.is_elsewhere("unix:/a", 1)
    assert not addresses.is_elsewhere("unix:/b", 1)
    assert not addresses.is_elsewhere("unix:/new", 1), "it belongs to no shard yet"
    assert changes == [1]
    leader.set_map(ClusterMap(1, 2), leader.now_ms)
    addresses._on_heard()
    assert changes == [1], "a heartbeat without another map is no change"


@pytest.mark.parametrize("stored", [None, b"", b"x"])
async def test_a_map_that_redis_does_not_have_any_more_is_written_again(
    cluster, written, leader, monkeypatch, stored: bytes | None
) -> None:
    monkeypatch.setattr(coordinator_module, "HEARTBEAT_S", 0.001)
    decides = coordinator(leader, written)
    await decides.set_num_shards(2, nothing)
    await beat(leader)
    running = asyncio.create_task(decides.run())
    await until(lambda: written.num_writes == 2, "the first map of the term")
    expected = cluster.map
    cluster.map = stored
    await beat(leader)
    await until(lambda: cluster.map == expected, "the map")
    await beat(leader)
    num_writes = written.num_writes
    await asyncio.sleep(0.01)
    assert written.num_writes == num_writes
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
