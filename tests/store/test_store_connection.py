"""The list of pools, and a Redis that is restarted or unavailable."""

import asyncio
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import redis
import uvloop
from redis_groups import Server

from quire.launcher.redis import EmbeddedRedis
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.errors import LeadershipLost, PoolFault, StoreUnavailable
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import Admission, Commit, CommitReply


async def test_a_dropped_pool_leaves_no_keys(store: Store, redis_client: redis.Redis) -> None:
    for incarnation in (1, 2, 2**64 - 1):
        await store.pool(incarnation, 11).open(0)
    assert await store.pools() == {1, 2, 2**64 - 1}
    for incarnation in (1, 2**64 - 1):
        await store.pool(incarnation, 11).drop()
    assert await store.pools() == {2}
    assert {key.rpartition(b":")[0] for key in redis_client.keys("quire:{shard:0}:pool:*")} == {
        b"quire:{shard:0}:pool:0000000000000002"
    }
    await store.pool(2, 11).drop()
    assert redis_client.keys("quire:{shard:0}:pool:*") == []


async def test_scripts_are_loaded_again_after_redis_lost_them(
    store: Store, redis_client: redis.Redis
) -> None:
    pool = store.pool(1, 11)
    step = await pool.open(0)
    redis_client.script_flush()
    reply = await pool.commit(Commit(step + 1, admissions=(Admission(1, 0, (), 1),)))
    assert reply == CommitReply(9, (), ((1,),))
    await pool.drop()


async def test_a_dropped_connection_is_reopened(store: Store, redis_client: redis.Redis) -> None:
    pool = store.pool(1, 11)
    step = await pool.open(0)
    redis_client.client_kill_filter(_type="normal", skipme=True)
    assert await pool.commit(Commit(step + 1)) == CommitReply(10, (), ())
    await pool.drop()


async def test_a_call_without_a_reply_times_out_and_the_next_one_gets_its_own(
    own_redis: EmbeddedRedis,
) -> None:
    connection = Connection.to(own_redis.url, timeout_s=0.2)
    assert await connection.execute("PING")
    with pytest.raises(StoreUnavailable, match=r"not responded for 0\.2 s"):
        await connection.execute("BLPOP", "nothing", 30)
    assert await connection.execute("ECHO", "mine") == b"mine"
    assert connection.num_calls == 3
    await connection.close()


async def test_calls_are_unavailable_until_redis_is_back(own_redis: EmbeddedRedis) -> None:
    store = Store.at(own_redis.url)
    await store.lease.acquire("", lease_ms=3000)
    pool = store.pool(1, 11)
    step = await pool.open(0)
    own_redis.stop()
    with pytest.raises(StoreUnavailable):
        await store.lease.renew()
    with pytest.raises(StoreUnavailable):
        await pool.commit(Commit(step + 1))
    own_redis.start()
    with pytest.raises(LeadershipLost, match="none"):  # it kept nothing
        await store.lease.renew()
    with pytest.raises(PoolFault, match="does not exist"):
        await pool.commit(Commit(step + 1))
    await store.close()


async def test_no_redis_or_a_wrong_password_is_unavailable(
    own_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    with pytest.raises(StoreUnavailable):
        await Store.at(f"unix://{tmp_path / 'absent.sock'}").pools()
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("requirepass", "right")
    with pytest.raises(StoreUnavailable, match=r"(?i)password|auth"):
        await Store.at(own_redis.url.replace("unix://", "unix://:wrong@")).pools()
    with pytest.raises(StoreUnavailable, match=r"(?i)auth"):
        await Store.at(own_redis.url).pools()
    for url, password in (
        (own_redis.url.replace("unix://", "unix://:right@"), None),
        (own_redis.url, "right"),
    ):
        store = Store.at(url, password)
        await store.pools()
        await store.close()


@pytest.mark.parametrize(
    ("refuse", "allow"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    ],
    ids=["a replica", "full"],
)
async def test_a_redis_that_takes_no_writes_is_unavailable(
    own_redis: EmbeddedRedis, refuse: tuple[str, ...], allow: tuple[str, ...]
) -> None:
    store = Store.at(own_redis.url)
    await store.lease.acquire("", lease_ms=3000)
    pool = store.pool(1, 11)
    step = await pool.open(0)
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command(*refuse)
        with pytest.raises(StoreUnavailable):
            await store.lease.renew()
        with pytest.raises(StoreUnavailable):
            await pool.commit(Commit(step + 1))
        client.execute_command(*allow)
    await store.lease.renew()
    await pool.commit(Commit(step + 1))
    await store.close()


async def test_a_primary_that_lost_its_replicas_is_left(own_redis: EmbeddedRedis) -> None:
    """Its replicas may follow another primary, which only a new connection finds."""
    store = Store.at(own_redis.url)
    await store.lease.acquire("", lease_ms=3000)
    await store.lease.renew()
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("min-replicas-to-write", 1)
        before = client.info("stats")["total_connections_received"]
        with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
            await store.lease.renew()
        assert client.info("stats")["total_connections_received"] > before
    await store.close()


async def test_a_reopened_store_finds_redis_again_by_each_connection(
    own_redis: EmbeddedRedis,
) -> None:
    store = Store.at(own_redis.url)
    await store.lease.acquire("", lease_ms=3000)
    await store.pools()
    with redis.Redis.from_url(own_redis.url) as client:
        before = client.info("stats")["total_connections_received"]
        calls = [asyncio.create_task(call()) for call in (store.lease.leader, store.pools)]
        await asyncio.sleep(0)  # they have begun
        store.reopen()
        leader, pools = await asyncio.gather(*calls)
        assert leader is not None
        assert pools == set()
        assert client.info("stats")["total_connections_received"] == before + 2
    await store.close()


async def test_a_new_leader_reads_from_the_server_that_has_its_lease(
    own_redis: EmbeddedRedis, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Another connection is still to the last primary, a replica without what was written since."""
    primary = tmp_path / "primary.sock"
    primary.symlink_to(own_redis.socket_path)
    store = Store.at(f"unix://{primary}")
    assert await store.lease.acquire("", lease_ms=3000)
    assert await store.pools() == set()
    await store.lease.release()
    with redis.Redis.from_url(own_redis.url) as client:
        client.replicaof("127.0.0.1", 1)
    primary.unlink()
    primary.symlink_to(redis_url.removeprefix("unix://"))
    redis_client.sadd(ShardKeys(0).pools, 7)
    assert await store.lease.acquire("", lease_ms=3000)
    assert await store.pools() == {7}
    await store.close()


async def test_an_invalid_url_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme"):
        Store.at("localhost:6379")


async def test_calls_in_progress_complete_before_their_connection_is_closed(redis_url: str) -> None:
    connection = Connection.to(redis_url, timeout_s=5)
    await connection.execute("PING")
    calls = [asyncio.create_task(connection.execute("INCR", "calls")) for _ in range(3)]
    await asyncio.sleep(0)  # they have begun
    await connection.close()
    assert [await call for call in calls] == [1, 2, 3]
    await connection.execute("DEL", "calls")
    await connection.close()


async def test_a_url_cannot_change_the_protocol(own_redis: EmbeddedRedis) -> None:
    connection = Connection.to(f"{own_redis.url}?protocol=3", timeout_s=5)
    await connection.execute("HSET", "a hash", "name", "value")
    assert await connection.execute("HGETALL", "a hash") == [b"name", b"value"]
    await connection.close()


async def test_a_redis_that_takes_no_scripts_is_unavailable(own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "few", "on", ">p", "~*", "+@all", "-script")
    store = Store.at(own_redis.url.replace("unix://", "unix://few:p@"))
    with pytest.raises(StoreUnavailable, match="NOPERM"):
        await store.lease.acquire("", lease_ms=3000)
    await store.close()


async def test_a_redis_that_denies_a_command_within_a_script_is_unavailable(
    own_redis: EmbeddedRedis,
) -> None:
    """INFO is one of the dangerous commands, which applications often may not run."""
    store = Store.at(own_redis.url.replace("unix://", "unix://few:p@"))
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "few", "on", ">p", "~*", "+@all", "-@dangerous")
        await store.lease.acquire("", lease_ms=3000)
        with pytest.raises(StoreUnavailable, match=r"NOPERM|can't run this command"):
            await store.lease.renew()
        client.execute_command("ACL", "SETUSER", "few", "+info")
        assert await store.lease.renew()
        client.execute_command("ACL", "SETUSER", "few", "resetkeys", "~other:*")
        with pytest.raises(StoreUnavailable, match="NOPERM"):
            await store.lease.renew()
        client.execute_command("ACL", "DELUSER", "few")
    await store.close()


async def test_a_redis_without_a_command_is_unavailable(tmp_path: Path) -> None:
    """Its operator has renamed it. The message does not repeat the arguments."""
    server = Server(tmp_path, *(f'rename-command {name} ""' for name in ("TIME", "SCAN", "RPUSH")))
    try:
        store = Store.at(f"redis://127.0.0.1:{server.port}")
        for call in (
            lambda: store.lease.acquire("", lease_ms=3000),
            store.load_live,
            lambda: store.put_in_inbox([b"a prompt"]),
        ):
            with pytest.raises(StoreUnavailable, match=r"(?i)unknown (redis )?command") as refused:
                await call()
            assert "prompt" not in str(refused.value)
        await store.close()
    finally:
        server.kill()


def test_a_server_that_closes_connections_at_once_is_unavailable() -> None:
    """As one at its `maxclients`. uvloop has an error of its own for a write to a closed socket."""

    def close_all(listening: socket.socket) -> None:
        reset = struct.pack("ii", 1, 0)
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.close()

    def delay_loop() -> None:
        """Let the connection be closed between any two writes."""
        time.sleep(0.001)
        asyncio.get_running_loop().call_soon(delay_loop)

    async def call(port: int) -> None:
        delay_loop()
        for url in (f"redis://127.0.0.1:{port}", f"redis+sentinel://127.0.0.1:{port}/any"):
            for _ in range(15):
                connection = Connection.to(url, timeout_s=5)
                with pytest.raises(StoreUnavailable):
                    await connection.execute("PING")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        closing = threading.Thread(target=close_all, args=(listening,))
        closing.start()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(call(listening.getsockname()[1]))
        listening.shutdown(socket.SHUT_RDWR)
        closing.join()


@pytest.mark.parametrize("kind", ["", "+sentinel", "+cluster"])
def test_a_name_whose_server_hangs_delays_not_the_end(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked up once, however often a connection is tried."""
    released, looked_up = threading.Event(), list[str]()
    getaddrinfo = socket.getaddrinfo

    def look_up(name: str, port: int, **options: int) -> object:
        if options.get("flags") or not name.endswith(".hangs"):
            return getaddrinfo(name, port, **options)
        looked_up.append(name)
        released.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "no response")

    monkeypatch.setattr("socket.getaddrinfo", look_up)

    async def call() -> None:
        connection = Connection.to(f"redis{kind}://redis.hangs:1", timeout_s=0.1)
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="not responded"):
                await connection.execute("PING")

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(call())
        assert looked_up == ["redis.hangs"]
        assert not released.is_set()
    finally:
        released.set()
