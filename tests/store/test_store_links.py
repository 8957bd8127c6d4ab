"""URLs of several Redis servers, and real ones: a cluster and Sentinels that lose their primary."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import redis
from redis.asyncio.cluster import NodesManager
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis_groups import Cluster, Sentinels, Server, running
from store_endings import finish
from waiting import until

from quire.service.addresses import Lookups
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.links.link import ServerLink
from scheduler_svc.store.links.nodes import find_node
from scheduler_svc.store.links.sentinels import find_primary
from scheduler_svc.store.links.urls import link_to
from scheduler_svc.store.requests import (
    Ending,
    OutputRange,
    RecordOutcome,
    RequestKey,
    RequestRecord,
    RequestState,
)
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import Admission, Commit, PrefixMatch, TokenRanges

KEYS = ShardKeys(0)
# A shard with keys in the last third of the slots.
OF_LAST_SLOTS = 3

_Result = TypeVar("_Result")


def test_each_scheme_has_its_link() -> None:
    for scheme in ("redis", "rediss"):
        assert isinstance(link_to(f"{scheme}://h", 1), ServerLink)
        assert link_to(f"{scheme}+sentinel://h", 1)._find is find_primary
        assert link_to(f"{scheme}+cluster://h", 1)._find is find_node


def test_a_url_of_sentinels_names_them_and_the_service() -> None:
    url = "rediss+sentinel://u:p%40w@one,two:7:9"
    with pytest.raises(ValueError, match=r"(?i)port"):
        link_to(url, 1)
    url = "rediss+sentinel://u:p%40w@one,[::1]:7/m?db=3&ssl_ca_certs=/ca&sentinel_password=s&protocol=3"
    servers = link_to(url, 1.5, "ignored")._servers
    assert servers.addresses == [("one", 26379), ("::1", 7)]
    assert (servers.service, servers.uses_tls) == ("m", True)
    redis_options, of_sentinels = servers.options, servers.sentinel_options
    assert (redis_options["username"], redis_options["password"]) == ("u", "p@w")
    assert (redis_options["db"], redis_options["protocol"]) == (3, 2)
    assert redis_options["ssl_ca_certs"] == of_sentinels["ssl_ca_certs"] == "/ca"
    assert redis_options["socket_timeout"] == of_sentinels["socket_connect_timeout"] == 1.5
    assert of_sentinels["password"] == "s"
    assert "username" not in of_sentinels
    assert "sentinel_password" not in redis_options


def test_a_url_of_a_cluster_names_nodes() -> None:
    servers = link_to("redis+cluster://one,two:7", 1, "secret")._servers
    assert servers.addresses == [("one", 6379), ("two", 7)]
    assert servers.options["password"] == "secret"


@pytest.mark.parametrize(
    "url", ["redis+other://h", "unix+cluster://h", "redis+cluster://", "redis+sentinel://a,,b/m"]
)
def test_an_invalid_url_of_several_servers_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL of Redis"):
        link_to(url, 1)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:secret@h/one", "database in 'one'"),
        ("redis://:secret@h/-1", "database in '-1'"),
        ("redis://:secret@h?db=1x", "database in '1x'"),
        ("unix:///r.sock?db=x", "database in 'x'"),
        ("redis+sentinel://h/m?db=x", "database in 'x'"),
        ("redis+cluster://:secret@h/3", "no database 3"),
        ("redis+cluster://h?db=3", "no database 3"),
        ("redis://:secret@h:99999/0", "(?i)port"),
        ("redis://:secret@h:x/0", "(?i)port"),
        ("redis://::1:6379/0", r"no valid host and port; an IPv6 address is in brackets"),
        ("redis+sentinel://fd00::7:26379/m", r"no valid host and port|no host in"),
        ("redis+cluster://[::1:7", "no valid host and port"),
        # Of a password with a slash Python's own message has the beginning.
        ("redis://:secret/other@h:6379", "in a password is written as %2F"),
        ("redis://:secret@h?bogus=1", "bogus"),
        ("redis+cluster://:secret@h?bogus=1", "bogus"),
        ("redis+sentinel://h/m?bogus=1", "bogus"),
        ("redis+sentinel://h/m?sentinel_bogus=1", "bogus"),
        # What one server takes, and a client of several does not.
        ("rediss+cluster://:secret@h?ssl_ca_path=/ca", "ssl_ca_path"),
        ("redis://:secret@h?retry=3", "parameter that cannot be used"),
        ("redis://:secret@h?socket_timeout=x", "socket_timeout"),
    ],
)
def test_an_unusable_part_of_a_url_is_refused_with_its_name(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        link_to(url, 1)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["redis://h", "redis://h/", "redis://h/3", "rediss://h?db=3", "unix:///a/b.sock?db=3",
     "redis+sentinel://h", "redis+sentinel://h/m?db=3", "redis+cluster://h", "redis+cluster://h/0"],
)  # fmt: skip
def test_a_url_without_or_with_a_database(url: str) -> None:
    link_to(url, 1)


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://h", "unix:///r.sock", "redis+sentinel://h", "redis+cluster://h"]
)
def test_a_url_that_asks_for_another_protocol_is_valid(url: str) -> None:
    link_to(f"{url}?protocol=3", 1)


def test_all_keys_have_one_slot() -> None:
    slots = {
        redis.crc.key_slot(key.encode())
        for key in (KEYS.leadership, KEYS.tenants, *KEYS.pool(7).all, *KEYS.request("{a}", "b}{c"))
    }
    assert len(slots) == 1


async def retried(call: Callable[[], Awaitable[_Result]], within_s: float = 20) -> _Result:
    """The result of a call, once Redis is available again."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def use(store: Store, number: int) -> None:
    """Call everything that a leader calls, and repeat, as it does, what fails: the nodes of a
    cluster agree on a new primary only after a while. Its pool and its record stay."""
    key = RequestKey("tenant", f"request-{number}")
    record = RequestRecord(key, b"digest", (1, 2), b"", sequence_id=number)
    assert await retried(lambda: store.record([record], [False])) == [RecordOutcome.NEW]
    await retried(lambda: store.append_output([OutputRange(key, 0, 0, (3, 4))]))
    pool = store.pool(number, 11)
    step = await retried(lambda: pool.open(0))
    commit = Commit(step + 1, admissions=(Admission(number, 0, (), 1),))
    assert (await retried(lambda: pool.commit(commit))).num_free_blocks == 9
    assert number in await retried(store.pools)
    match = await retried(lambda: store.match_pools([pool], [[b"x" * 32]]))
    assert match == [[PrefixMatch(0, 0)]]
    await retried(lambda: store.write_tenants(b"state"))
    assert (await retried(store.tenants))[0] == b"state"
    assert key in [stored.record.key for stored in await retried(store.load_live)]
    await retried(lambda: finish(store, [Ending(key, RequestState.FINISHED)]))
    stored = await retried(lambda: store.load(key))
    assert stored is not None
    assert list(stored.output_token_ids[0]) == [3, 4]
    await retried(store.lease.renew)


async def take_lead(store: Store) -> None:
    assert await store.lease.acquire("here", lease_ms=60_000) is not None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, KEYS.leadership)
    with running(cluster):
        yield cluster


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    sentinels = Sentinels(tmp_path)
    with running(sentinels):
        yield sentinels


@pytest.mark.slow
async def test_a_cluster_serves_while_slots_move_and_a_primary_dies(cluster: Cluster) -> None:
    store = Store.at(cluster.url)
    await take_lead(store)
    await use(store, 1)
    home = cluster.owner
    cluster.move_slot(next(one for one in cluster.servers[:3] if one is not home))
    await retried(store.lease.renew)
    await use(store, 2)
    assert await retried(store.pools) == {1, 2}
    # The keys are back at the node with the replica, which is promoted.
    cluster.move_slot(home)
    before = await retried(store.lease.renew)
    cluster.owner.kill()
    after = await retried(store.lease.renew)
    assert after != before, "by which the leader knows that writes may be lost"
    await use(store, 3)
    await store.close()


@pytest.mark.slow
async def test_what_fails_while_a_slot_moves_has_changed_nothing(cluster: Cluster) -> None:
    """A script on the node that gives the slot away fails at each key that is absent, also at one
    that has expired, or that it has just deleted."""
    store = Store.at(cluster.url)
    await take_lead(store)
    requests = [RequestRecord(RequestKey("", str(n)), b"", (1,), b"", n) for n in range(4)]
    expired, cancelled, running, moved = requests
    await store.record(requests, [False] * 4)
    await finish(store, [Ending(expired.key, RequestState.FINISHED)], ttl_s=1)
    await finish(store, [Ending(cancelled.key, RequestState.CANCELLED)])
    pool = store.pool(1, 11)
    step = await pool.open(0) + 1
    admissions = (Admission(1, 0, (), 1, (b"x" * 32,)), Admission(2, 0, (), 1))
    await pool.commit(Commit(step, admissions=admissions))
    ranges = TokenRanges([1], [0], [1], [3])
    await pool.commit(Commit(step + 1, token_ranges=ranges, removed=(2,), returned_blocks=(2,)))
    # Between the removal of the only hash and the next one, the pool has none.
    admission = Admission(3, 0, (), 1, (b"y" * 32,))
    following = Commit(step + 2, withdrawals=(1,), admissions=(admission,))
    await store.append_output([OutputRange(one.key, 0, 0, (3,)) for one in (running, moved)])
    [record, _] = KEYS.request("", expired.key.request_id)
    await until(lambda: not cluster.owner.do("EXISTS", record), "an expired record")
    target = next(one for one in cluster.servers[:3] if one is not cluster.owner)
    cluster.begin_move(target)
    run_id = await store.lease.renew()
    again = replace(cancelled, sequence_id=9)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: finish(store, [Ending(running.key, RequestState.FINISHED)]),
        lambda: store.record([again], [False]),
        lambda: pool.commit(following),
        store.load_live,
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match=r"non local key|ASK"):
            await call()
    for key in KEYS.request("", moved.key.request_id):
        cluster.move_key(key, target)
    with pytest.raises(StoreUnavailable, match="ASK"):
        await store.load_live()
    cluster.end_move(target)
    assert await retried(store.lease.renew) != run_id
    assert [one.record for one in await store.load_live()] == [running, moved]
    assert await store.record([again], [False]) == [RecordOutcome.NEW]
    assert (await pool.commit(following)).num_free_blocks == 8
    await pool.audit()
    await finish(store, [Ending(running.key, RequestState.FINISHED)])
    assert [one.record for one in await store.load_live()] == [moved, again]
    await store.close()


@pytest.mark.slow
async def test_a_dead_node_with_other_slots_is_no_obstacle(cluster: Cluster) -> None:
    assert cluster.owner is cluster.servers[0], "with the first slots"
    # Until its replica has noticed, the others name it as the owner of these slots.
    cluster.owner.kill()
    store = Store.at(cluster.url, shard=OF_LAST_SLOTS)
    await take_lead(store)
    await use(store, 1)
    await store.close()


@pytest.mark.slow
async def test_a_cluster_without_slots_is_unavailable(tmp_path: Path) -> None:
    """Its nodes run, and are about to be joined."""
    server = Server(tmp_path, "cluster-enabled yes")
    try:
        store = Store.at(f"redis+cluster://127.0.0.1:{server.port}")
        with pytest.raises(StoreUnavailable, match="has slots"):
            await store.lease.leader()
        await store.close()
    finally:
        server.kill()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_search_that_is_cancelled_leaves_no_connection_to_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, "cluster-enabled yes")
    server.do("CLUSTER", "ADDSLOTS", *range(16384))
    servers = link_to(f"redis+cluster://127.0.0.1:{server.port}", 5, key="key")._servers
    logged: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(context))
    searches: list[asyncio.Task[tuple[str, int]]] = []
    close = NodesManager.aclose

    def close_cancelled(nodes: NodesManager, *args: str) -> Awaitable[None]:
        searches[0].cancel()
        return close_slowly(nodes, *args)

    async def close_slowly(nodes: NodesManager, *args: str) -> None:
        await close(nodes, *args)
        raise RedisTimeoutError("timed out closing a connection")

    monkeypatch.setattr(NodesManager, "aclose", close_cancelled)
    try:
        searches.append(asyncio.create_task(find_node(servers)))
        await asyncio.wait(searches)
        assert searches.pop().cancelled()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)
        gc.collect()
        assert not logged
    finally:
        server.kill()


async def test_a_cluster_that_refuses_says_why(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        server.do("ACL", "SETUSER", "few", "on", ">p", "~*", "+@all", "-cluster")
        for user, reason in (("", "cluster support disabled"), ("few:p@", "no permissions")):
            store = Store.at(f"redis+cluster://{user}127.0.0.1:{server.port}")
            with pytest.raises(StoreUnavailable, match=reason):
                await store.lease.leader()
            await store.close()
    finally:
        server.kill()


@pytest.mark.slow
async def test_a_node_that_hangs_is_no_obstacle(cluster: Cluster) -> None:
    cluster.servers[1].suspend()
    # The order in which nodes are asked is random.
    for _ in range(8):
        store = Store.at(cluster.url)
        await store.pools()
        await store.close()


@pytest.mark.slow
async def test_sentinels_name_the_promoted_replica(sentinels: Sentinels) -> None:
    store = Store.at(sentinels.url)
    await take_lead(store)
    await use(store, 1)
    before = await store.lease.renew()
    sentinels.primary.kill()
    with pytest.raises(StoreUnavailable):
        await store.lease.renew()
    # One of them is enough to find the primary.
    sentinels.sentinels[0].kill()
    after = await retried(store.lease.renew)
    assert after != before
    await use(store, 2)
    await store.close()


def sentinel(directory: Path, primary_port: int, config_epoch: int) -> Server:
    """One of its own. Its primary, which does not run, counts as down only after half a minute."""
    return Server(
        directory,
        f"sentinel monitor quire 127.0.0.1 {primary_port} 1",
        f"sentinel config-epoch quire {config_epoch}",
    )


async def test_a_sentinel_that_hangs_or_knows_an_older_primary_is_no_obstacle(
    tmp_path: Path,
) -> None:
    group = [sentinel(tmp_path, port, epoch) for port, epoch in ((1, 9), (2, 4), (3, 5))]
    try:
        group[0].suspend()
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in group)
        servers = link_to(f"redis+sentinel://{hosts}/quire", 30)._servers
        async with asyncio.timeout(20):
            assert await find_primary(servers) == ("127.0.0.1", 3)
    finally:
        for one in group:
            one.kill()


async def test_a_name_whose_server_hangs_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = Lookups.resolve

    async def hang(lookups: Lookups, name: str) -> frozenset[str]:
        if "hangs" in name:
            await asyncio.get_running_loop().create_future()
        return await resolve(lookups, name)

    monkeypatch.setattr(Lookups, "resolve", hang)
    node = Server(tmp_path, "cluster-enabled yes")
    node.do("CLUSTER", "ADDSLOTS", *range(16384))
    one = sentinel(tmp_path, 3, 1)
    try:
        for kind, server, find, port in (
            ("sentinel", one, find_primary, 3),
            ("cluster", node, find_node, node.port),
        ):
            hosts = f"redis.hangs:1,127.0.0.1:{server.port}"
            path = "/quire" if kind == "sentinel" else ""
            servers = link_to(f"redis+{kind}://{hosts}{path}", 30)._servers
            async with asyncio.timeout(20):
                assert await find(servers) == ("127.0.0.1", port)
    finally:
        one.kill()
        node.kill()


async def test_sentinels_without_a_primary_say_why(tmp_path: Path) -> None:
    one = sentinel(tmp_path, 1, 1)
    try:
        servers = link_to(f"redis+sentinel://127.0.0.1:2,127.0.0.1:{one.port}/other", 5)._servers
        with pytest.raises(RedisConnectionError, match=r"'other': .*127\.0\.0\.1:2.* not monitor"):
            await find_primary(servers)
    finally:
        one.kill()


async def test_sentinels_without_a_primary_say_why_in_their_order(tmp_path: Path) -> None:
    """Reasons are logged once: the order in which Sentinels respond must not change them."""
    one = sentinel(tmp_path, 1, 1)
    addresses = [f"127.0.0.1:{one.port}", "127.0.0.1:2"]
    try:
        for order in (addresses, addresses[::-1]):
            servers = link_to(f"redis+sentinel://{','.join(order)}/other", 5)._servers
            with pytest.raises(RedisConnectionError, match=".*".join(order)):
                await find_primary(servers)
    finally:
        one.kill()


async def test_unreachable_servers_are_unavailable() -> None:
    for kind in ("sentinel", "cluster"):
        with pytest.raises(StoreUnavailable):
            await Store.at(f"redis+{kind}://127.0.0.1:1,127.0.0.1:2").pools()
