"""What a scheduler knows of the others: who runs, which loads count, which map it uses."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from scripted_cluster import EXPIRY_S, ScriptedCluster, beat
from structlog.testing import capture_logs
from waiting import until

from scheduler_svc.cluster import membership as membership_module
from scheduler_svc.cluster.cluster_map import MAX_SHARDS, ClusterMap
from scheduler_svc.cluster.heartbeats import HEARTBEAT_S, RETURN_S
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.cluster.membership import LED_S, NUM_STANDBYS, Membership
from scheduler_svc.store.cluster import Timed
from scheduler_svc.store.errors import StoreUnavailable


@pytest.fixture
def cluster() -> ScriptedCluster:
    return ScriptedCluster()


@pytest.fixture
async def three(cluster: ScriptedCluster) -> list[Membership]:
    """Three schedulers that know each other."""
    members = [cluster.member(address) for address in "abc"]
    await beat(*members, *members)
    return members


def addresses(member: Membership) -> str:
    return "".join(sorted(member.members.values()))


async def test_schedulers_know_each_other_by_their_heartbeats(three: list[Membership]) -> None:
    assert [addresses(member) for member in three] == ["abc"] * 3
    assert len({member.id for member in three}) == 3


def test_alone_a_scheduler_owns_all_shards(cluster: ScriptedCluster) -> None:
    member = cluster.member("a")
    assert not member.is_known.is_set()
    assert addresses(member) == "a"
    assert member.is_owner(0)


async def test_one_without_heartbeats_is_forgotten_when_they_expire(cluster, three) -> None:
    first, second, _ = three
    for _ in range(round(EXPIRY_S / HEARTBEAT_S)):
        cluster.now_s += HEARTBEAT_S
        await beat(first, second)
    assert addresses(first) == "abc"
    cluster.now_s += HEARTBEAT_S
    await beat(first, second)
    assert addresses(first) == addresses(second) == "ab"


async def test_one_that_drains_counts_no_more_at_once(cluster, three) -> None:
    first, second, third = three
    third.leave()
    assert addresses(third) == "ab", "nor for itself"
    await beat(third, first)
    assert addresses(first) == "ab"
    # Its load still counts: it leads until it has released the lease.
    third.lead(0, lambda: ShardLoad("c", num_live=3))
    await beat(third, second)
    assert second.loads[0].num_live == 3


async def test_one_that_has_ended_counts_no_more_until_it_sends_a_heartbeat(cluster, three) -> None:
    first, _, third = three
    cluster.now_s += 0.1
    # After the last reading before its end is noticed.
    await beat(third)
    cluster.now_s += 0.1
    heard = []
    first.listen(lambda: heard.append(addresses(first)))
    first.mark_ended("c")
    assert heard == ["ab"]
    await beat(first)
    assert addresses(first) == "ab", "a heartbeat from before its end proves nothing"
    cluster.now_s += 2 * HEARTBEAT_S
    await beat(third, first)
    assert addresses(first) == "abc", "it had not ended"


async def test_another_process_at_the_address_of_one_that_has_ended_counts(cluster, three) -> None:
    first = three[0]
    first.mark_ended("c")
    cluster.now_s += 2 * HEARTBEAT_S
    successor = cluster.member("c")
    await beat(successor, first)
    assert addresses(first) == "abc"
    assert successor.id in first.members
    assert three[2].id not in first.members


async def test_no_scheduler_is_taken_for_ended_when_redis_loses_its_writes(cluster, three) -> None:
    first, second, third = three
    cluster.now_s += HEARTBEAT_S
    cluster.lose_writes()
    await beat(first)
    assert addresses(first) == "abc"
    cluster.now_s += HEARTBEAT_S
    await beat(second, first)
    assert addresses(first) == "abc"
    # But one that has not come back by then has ended.
    for _ in range(round(RETURN_S / HEARTBEAT_S)):
        cluster.now_s += HEARTBEAT_S
        await beat(first, second)
    assert addresses(first) == "ab"
    await beat(third, first)
    assert addresses(first) == "abc"


@pytest.mark.parametrize("passed_s", [60, -60])
async def test_no_scheduler_is_taken_for_ended_after_an_outage_or_by_another_time(
    cluster, three, passed_s: int
) -> None:
    first, second, third = three
    cluster.now_s += passed_s
    await beat(first)
    assert list(cluster.schedulers) == [first.id]
    assert addresses(first) == "abc"
    cluster.now_s += HEARTBEAT_S
    await beat(second, third, first)
    cluster.now_s += RETURN_S
    await beat(second, third, first)
    assert addresses(first) == "abc"


async def test_an_end_that_is_known_counts_also_when_writes_are_lost(cluster, three) -> None:
    first, second, _ = three
    first.mark_ended("c")
    cluster.lose_writes()
    cluster.now_s += HEARTBEAT_S
    await beat(first, second, first)
    assert addresses(first) == "ab"
    cluster.lose_writes()
    await beat(first)
    first.mark_ended("b")
    assert addresses(first) == "a"


async def test_loads_count_while_their_leaders_write_them(cluster, three) -> None:
    first, second, _ = three
    load = ShardLoad("a", num_workers=2, num_free_rows=5, num_live=7, num_waiting=1)
    first.lead(1, lambda: load)
    cluster.set_map(ClusterMap(1, 3))
    await beat(first, second)
    assert second.loads == [ShardLoad(), load, ShardLoad()]
    load = replace(load, num_live=8)
    await beat(first, second)
    assert second.loads[1].num_live == 8
    first.stop_leading(1)
    for _ in range(round(EXPIRY_S / HEARTBEAT_S) + 1):
        cluster.now_s += HEARTBEAT_S
        await beat(first, second)
    assert second.loads[1] == ShardLoad()


def test_numbers_that_a_later_version_appends_to_a_load_are_ignored() -> None:
    load = ShardLoad("a", 1, 2, 3, 4, 5, 6, 7, 8)
    assert ShardLoad.parse(b'["a", 1, 2, 3, 4, 5, 6, 7, 8, 9]') == load
    assert ShardLoad.parse(b'["a", 1, 2]') == ShardLoad("a", 1, 2), "of an earlier version"


async def test_an_unreadable_load_is_none(cluster, three) -> None:
    first, second, _ = three
    first.lead(0, lambda: ShardLoad("a"))
    await beat(first)
    unreadable = (
        b"",
        b"{}",
        b"3",
        b"[]",
        b"[1, 2, 3, 4, 5, 6]",
        b'["a", 1, 2, 3, 4, 5, 6, "7"]',
        b'["a", "1"]',
        b'["a", -1]',
    )
    with capture_logs() as logs:
        for packed in unreadable:
            cluster.loads[0] = replace(cluster.loads[0], value=packed)
            await beat(second, second)
            assert second.loads == [ShardLoad()]
    assert [line["shard"] for line in logs] == [0] * len(unreadable), "once each"


async def test_an_unreadable_or_older_map_changes_nothing(cluster, three) -> None:
    first = three[0]
    cluster.set_map(ClusterMap(5, 2))
    await beat(first)
    for packed in (b"", b"[]", b"{}", ClusterMap(4, 1).pack(), None):
        cluster.map = packed
        await beat(first)
        assert (first.map.version, first.map.num_shards) == (5, 2)
    first.set_map(ClusterMap(5, 7), cluster.now_ms)
    assert first.map.num_shards == 2
    first.set_map(ClusterMap(6, 7), cluster.now_ms)
    assert first.map.num_shards == 7


BROKEN_MAPS = (
    b"",
    b"[]",
    b"{",
    b"\xff",
    b'{"version": 1}',
    ClusterMap(3, 0).pack(),
    ClusterMap(3, MAX_SHARDS + 1).pack(),
    ClusterMap(3, 4).pack().replace(b"3", b"1e999"),
    b"[" * 100_000,
)


@pytest.mark.parametrize("packed", [*BROKEN_MAPS, None], ids=lambda packed: repr(packed)[:20])
async def test_after_a_restart_loads_show_the_shards_of_a_lost_map(cluster, packed) -> None:
    cluster.loads = {shard: Timed(0, b"old") for shard in (0, 2, 5, MAX_SHARDS)}
    cluster.map = packed
    member = cluster.member("a")
    with capture_logs() as logs:
        await beat(member, member)
    assert member.map.num_shards == 6
    assert member.is_map_lost
    assert member.is_known.is_set()
    assert member.problem is None
    assert [line["event"] for line in logs].count("the map of the cluster has lost shards") == 1


async def test_a_map_with_fewer_shards_than_there_are_loads_has_lost_shards(cluster, three) -> None:
    cluster.loads = {shard: Timed(0, b"old") for shard in (0, 3)}
    cluster.set_map(ClusterMap(5, 2))
    await beat(three[0])
    assert (three[0].map.version, three[0].map.num_shards) == (5, 4)
    cluster.loads = {}
    cluster.set_map(ClusterMap(6, 1))
    await beat(three[0])
    assert (three[0].map.version, three[0].map.num_shards) == (6, 4), "it never falls"


@pytest.mark.parametrize("packed", BROKEN_MAPS, ids=lambda packed: repr(packed)[:20])
async def test_a_map_that_is_not_readable_is_refused_if_nothing_shows_the_shards(
    cluster, packed
) -> None:
    cluster.map = packed
    member = cluster.member("a")
    with capture_logs() as logs:
        await beat(member, member)
    assert not member.is_known.is_set()
    assert "quire:{shard:0}:cluster:map" in str(member.problem)
    [line] = logs
    assert line["key"] == "quire:{shard:0}:cluster:map"
    # It is deleted, as the message says.
    cluster.map = None
    await beat(member)
    assert member.is_known.is_set()
    assert member.problem is None
    assert not member.is_map_lost


async def test_a_shard_is_handed_over_to_one_that_runs_by_a_newer_map(cluster, three) -> None:
    first, second, third = three
    cluster.set_map(ClusterMap(4, 3, {0: first.id, 1: second.id, 2: "gone"}))
    await beat(first)
    assert not first.should_hand_over(1, led_since=3), "its owner has not read the map"
    cluster.now_s += HEARTBEAT_S
    await beat(second, first)
    assert not first.should_hand_over(0, led_since=3)
    assert first.should_hand_over(1, led_since=3)
    # This map has named another one already when it acquired the lease.
    assert not first.should_hand_over(1, led_since=4)
    assert not first.should_hand_over(2, led_since=3), "its owner does not run"
    assert not first.should_hand_over(9, led_since=3), "the map does not know it"
    first.mark_ended("b")
    assert not first.should_hand_over(1, led_since=3)
    # Every scheduler finds the same owner for a shard without one, among those that stand by.
    cluster.now_s += 1
    await beat(second, third, first)
    [owner] = [member for member in three if member.is_owner(2)]
    assert owner.is_candidate(2)
    assert sum(member.is_candidate(2) for member in three) == 2


async def test_a_heartbeat_that_redis_got_before_the_map_proves_nothing(cluster, three) -> None:
    """The coordinator's clock lags behind Redis' by the time that replies take."""
    first, second, _ = three
    cluster.set_map(ClusterMap(4, 2, {0: first.id, 1: first.id}))
    await beat(first)
    cluster.now_s += 0.01
    await beat(second)
    reading = await first._beat(first.address)
    cluster.now_s += 0.01
    following = ClusterMap(5, 2, {0: first.id, 1: second.id})
    cluster.set_map(following)
    written_ms = cluster.now_ms
    # As if both replies had taken longer than the time between them.
    cluster.now_s -= 0.02
    first.set_map(following, written_ms)
    cluster.now_s += 0.03
    first._take(reading)
    assert not first.should_hand_over(1, led_since=4)
    await beat(second, first)
    assert first.should_hand_over(1, led_since=4)


async def test_the_map_names_the_owner_while_it_runs_however_uneven_it_is(cluster, three) -> None:
    """A scheduler that has just started has not got its part yet."""
    first, second, third = three
    cluster.set_map(ClusterMap(1, 6, dict.fromkeys(range(5), first.id) | {5: second.id}))
    await beat(*three)
    for member in three:
        assert [member.is_owner(shard) for shard in range(6)] == [
            member is (second if shard == 5 else first) for shard in range(6)
        ]
        assert [member.owner_of(shard) for shard in (0, 5)] == [first.id, second.id]
    for member in (second, third):
        member.mark_ended("a")
    owners = [second.owner_of(shard) for shard in range(6)]
    assert {*owners} == {second.id, third.id}
    assert [third.owner_of(shard) for shard in range(6)] == owners


async def test_a_scheduler_that_leaves_names_the_owners_that_the_others_find(
    cluster, monkeypatch
) -> None:
    # Ids of which the first candidates are not spread evenly.
    ids = iter(["i0", "i1", "i2"])
    monkeypatch.setattr(membership_module.secrets, "token_hex", lambda size: next(ids))
    members = [cluster.member(address) for address in "abc"]
    cluster.set_map(ClusterMap(1, 6, {shard: f"i{shard % 3}" for shard in range(6)}))
    await beat(*members, *members)
    first, *others = members
    first.leave()
    named = [first.owner_of(shard) for shard in range(6)]
    await beat(*members)
    for member in others:
        assert [member.owner_of(shard) for shard in range(6)] == named


async def test_an_owner_and_a_few_others_stand_by_for_a_shard(cluster: ScriptedCluster) -> None:
    members = [cluster.member(f"m{number}") for number in range(6)]
    await beat(*members, *members)
    cluster.set_map(ClusterMap(1, 12, {n: members[n % 6].id for n in range(12)}))
    await beat(*members)
    for shard in range(12):
        candidates = [member for member in members if member.is_candidate(shard)]
        assert len(candidates) == 1 + NUM_STANDBYS
        [owner] = [member for member in members if member.is_owner(shard)]
        assert owner.id == members[shard % 6].id
        assert owner in candidates
    members[0].lead(0, lambda: ShardLoad("m0"))
    await beat(*members)
    assert {member.leader_of(0) for member in members} == {"m0"}
    # One of them is the owner of a shard whose owner has ended, and all find the same one.
    for member in members[1:]:
        member.mark_ended("m0")
    left = members[1:]
    assert {member.leader_of(0) for member in left} == {left[0].owner_address(0)} != {"m0"}
    for shard in range(12):
        candidates = [member for member in left if member.is_candidate(shard)]
        [owner] = [member for member in left if member.is_owner(shard)]
        assert owner in candidates
        assert len(candidates) == NUM_STANDBYS + (shard % 6 != 0)


async def test_a_shard_is_led_while_its_leader_writes_its_load(cluster, three) -> None:
    first, second, _ = three
    assert not second.is_led(0)
    first.lead(0, lambda: ShardLoad("a"))
    await beat(first, second)
    assert second.is_led(0)
    cluster.now_s += LED_S - 0.001
    assert second.is_led(0)
    cluster.now_s += 0.001
    assert not second.is_led(0), "its leader is silent"
    await beat(first, second)
    assert second.is_led(0)
    second.mark_ended("a")
    assert not second.is_led(0)


async def test_a_load_from_the_future_is_none_after_the_clock_was_set_back(cluster, three) -> None:
    """Its leader may have ended since: the lease has to be read."""
    first, second, _ = three
    first.lead(0, lambda: ShardLoad("a"))
    await beat(first, second)
    cluster.now_s -= 60
    await beat(second)
    assert not second.is_led(0)
    assert second.loads[0] == ShardLoad()
    await beat(first, second)
    assert second.is_led(0)
    assert second.loads[0] == ShardLoad("a")


async def test_a_load_is_not_fresh_after_the_clock_was_set_back_by_less_than_its_expiry(
    cluster, three
) -> None:
    first, second, _ = three
    first.lead(0, lambda: ShardLoad("a"))
    await beat(first, second)
    cluster.now_s -= LED_S
    await beat(second)
    assert second.loads[0] == ShardLoad("a")
    assert not second.is_led(0)


async def test_heartbeats_are_retried_and_sent_at_once_when_a_shard_is_led(monkeypatch) -> None:
    class Failing(ScriptedCluster):
        num_failures = 5

        async def beat(self, *args):
            if self.num_failures:
                self.num_failures -= 1
                raise StoreUnavailable("lost" if self.num_failures % 2 else "refused")
            return await super().beat(*args)

    cluster = Failing()
    member = cluster.member("a")
    monkeypatch.setattr(membership_module, "HEARTBEAT_S", 0.001)
    with capture_logs() as logs:
        running = asyncio.create_task(member.run())
        await member.is_known.wait()
    assert [line["reason"] for line in logs] == ["refused", "lost"], "once each"
    monkeypatch.setattr(membership_module, "HEARTBEAT_S", 1000)
    await until(lambda: member._wake._waiters, "a pause")
    member.lead(0, lambda: ShardLoad("a"))
    await until(lambda: 0 in cluster.loads, "the load")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert cluster.schedulers[member.id].value == b"", "it has left"


async def test_a_shard_that_is_led_during_a_heartbeat_is_in_the_next_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(ScriptedCluster):
        def __init__(self) -> None:
            super().__init__()
            self.responds = asyncio.Event()

        async def beat(self, *args):
            reading = await super().beat(*args)
            await self.responds.wait()
            return reading

    cluster = Slow()
    member = cluster.member("a")
    monkeypatch.setattr(membership_module, "HEARTBEAT_S", 1000)
    running = asyncio.create_task(member.run())
    await until(lambda: member.id in cluster.schedulers, "the first heartbeat")
    member.lead(0, lambda: ShardLoad("a"))
    cluster.responds.set()
    await until(lambda: 0 in cluster.loads, "the load")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
