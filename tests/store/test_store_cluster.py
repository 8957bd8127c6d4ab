"""What schedulers share in Redis: heartbeats, loads, the map, and the shards of ids."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from redis_groups import Cluster, running

from scheduler_svc.store.cluster import ClusterStore
from scheduler_svc.store.errors import LeadershipLost, StaleEpoch
from scheduler_svc.store.id_directory import Claim, IdDirectory
from scheduler_svc.store.keys import ClusterKeys
from scheduler_svc.store.requests import RequestKey
from scheduler_svc.store.store import Store

EXPIRY_MS = 60_000
KEYS = ClusterKeys()


@pytest.fixture
def lasting_keys(lasting_keys: list[str]) -> list[str]:
    return [*lasting_keys, "quire:{shard:0}:cluster:*"]


@pytest.fixture
async def heartbeats(redis_url: str) -> AsyncIterator[ClusterStore]:
    heartbeats = ClusterStore.at(redis_url)
    yield heartbeats
    await heartbeats.close()


async def test_schedulers_read_each_other(heartbeats: ClusterStore) -> None:
    first = await heartbeats.beat("a", "host:1", EXPIRY_MS, {0: b"light", 7: b"heavy load"})
    assert first.packed_map is None
    reading = await heartbeats.beat("b", "host:2", EXPIRY_MS, {})
    found = {name: timed.value for name, timed in reading.schedulers.items()}
    assert found == {"a": b"host:1", "b": b"host:2"}
    assert {shard: timed.value for shard, timed in reading.loads.items()} == {
        0: b"light",
        7: b"heavy load",
    }
    assert first.now_ms == reading.schedulers["a"].written_ms == reading.loads[7].written_ms
    assert reading.now_ms >= first.now_ms


async def test_one_that_leaves_is_read_without_an_address(heartbeats: ClusterStore) -> None:
    await heartbeats.beat("a", "host:1", EXPIRY_MS, {})
    await heartbeats.beat("a", "", EXPIRY_MS, {1: b"still"})
    reading = await heartbeats.beat("b", "host:2", EXPIRY_MS, {})
    assert reading.schedulers["a"].value == b""
    assert reading.loads[1].value == b"still"


@pytest.mark.parametrize("passed_ms", [EXPIRY_MS + 1000, -EXPIRY_MS - 1000])
async def test_one_without_heartbeats_is_forgotten(
    heartbeats: ClusterStore, redis_client: redis.Redis, passed_ms: int
) -> None:
    """Also one of a time that Redis' clock has left."""
    reading = await heartbeats.beat("a", "host:1", EXPIRY_MS, {0: b"load"})
    redis_client.hset(KEYS.schedulers, "a", f"{reading.now_ms - passed_ms} host:1")
    reading = await heartbeats.beat("b", "host:2", EXPIRY_MS, {})
    assert list(reading.schedulers) == ["b"]
    assert redis_client.hkeys(KEYS.schedulers) == [b"b"]
    # Redis does not know whose load it was; readers check its age.
    assert list(reading.loads) == [0]


async def test_what_no_scheduler_has_written_is_ignored(
    heartbeats: ClusterStore, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.schedulers, "broken", "no time")
    redis_client.hset(KEYS.loads, mapping={"broken": "1 load", "1": "no time"})
    redis_client.hset(KEYS.tenants, mapping={"broken": "report", "1": "other"})
    reading = await heartbeats.beat("a", "host:1", EXPIRY_MS, {0: b"load"})
    assert list(reading.schedulers) == ["a"]
    assert {shard: timed.written_ms > 0 for shard, timed in reading.loads.items()} == {
        0: True,
        1: False,
    }
    assert await heartbeats.exchange(0, b"report") == {0: b"report", 1: b"other"}


async def test_only_the_leader_of_shard_0_writes_the_map(
    redis_url: str, heartbeats: ClusterStore, redis_client: redis.Redis
) -> None:
    first, second = Store.at(redis_url), Store.at(redis_url)
    with pytest.raises(LeadershipLost):
        await first.write_map(b"early")
    await first.lease.acquire("first", lease_ms=3000)
    await first.write_map(b"map")
    assert (await heartbeats.beat("a", "host:1", EXPIRY_MS, {})).packed_map == b"map"
    await second.lease.acquire("second", lease_ms=0)
    with pytest.raises(StaleEpoch):
        await first.write_map(b"late")
    await second.write_map(b"newer")
    assert redis_client.get(KEYS.map) == b"newer"
    redis_client.flushall()
    with pytest.raises(LeadershipLost):
        await second.write_map(b"lost")
    for store in (first, second):
        await store.close()


IDS = [
    RequestKey(tenant, f"request {number}") for tenant in ("", "a/b", "{c}") for number in range(20)
]


async def check_directory(directory: IdDirectory) -> None:
    """Claims of all kinds, over all parts of the directory."""
    mine, others = IDS[:40], IDS[40:]
    assert await directory.claim(mine, 1, 60, Claim.NEW) == [1] * 40
    # Each id has one shard, that of the first claim.
    assert await directory.claim(IDS, 2, 60, Claim.NEW) == [1] * 40 + [2] * 20
    assert await directory.claim(IDS, 1, 60, Claim.NEW) == [1] * 40 + [2] * 20
    # Moves are noted of ids that were claimed only.
    unknown = RequestKey("a", "b/c")
    assert await directory.claim([*others, unknown], 3, 60, Claim.KNOWN) == [3] * 20 + [None]
    assert await directory.claim([unknown], 4, 60, Claim.NEW) == [4]
    assert await directory.claim([*IDS, unknown], 5, 60, Claim.ALL) == [5] * 61
    assert await directory.claim([], 5, 60, Claim.ALL) == []
    # Of two shards that claim an id at once, one gets it.
    wanted = [RequestKey("x", f"{number}") for number in range(30)]
    first, second = await asyncio.gather(
        directory.claim(wanted, 1, 60, Claim.NEW), directory.claim(wanted, 2, 60, Claim.NEW)
    )
    assert first == second
    assert {*first} <= {1, 2}


async def test_ids_have_one_shard(redis_url: str, redis_client: redis.Redis) -> None:
    directory = IdDirectory.at(redis_url)
    await check_directory(directory)
    await directory.close()
    assert all(0 < redis_client.ttl(key) <= 60 for key in redis_client.scan_iter("quire:{ids:*"))


async def test_a_claim_is_forgotten_unless_it_is_renewed(
    redis_url: str, redis_client: redis.Redis
) -> None:
    directory = IdDirectory.at(redis_url)
    await directory.claim(IDS[:2], 1, 60, Claim.NEW)
    await directory.claim(IDS[:1], 1, 6000, Claim.KNOWN)
    left_s = sorted(redis_client.ttl(key) for key in redis_client.scan_iter())
    assert left_s[0] <= 60 < left_s[1]
    await directory.close()


@pytest.fixture
def redis_cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, KEYS.map)
    with running(cluster):
        yield cluster


@pytest.mark.slow
async def test_a_redis_cluster_shares_ids_among_its_nodes(redis_cluster: Cluster) -> None:
    directory = IdDirectory.at(redis_cluster.url)
    await check_directory(directory)
    await directory.close()
    heartbeats = ClusterStore.at(redis_cluster.url)
    reading = await heartbeats.beat("a", "host:1", EXPIRY_MS, {0: b"load"})
    assert list(reading.schedulers) == ["a"]
    await heartbeats.close()
    primaries = redis_cluster.servers[:3]
    assert all(int(str(server.do("DBSIZE"))) > 0 for server in primaries)
