"""The list of pools, and a Redis that is restarted or away."""

import asyncio
from pathlib import Path

import pytest
import redis

from quire.launcher.redis import EmbeddedRedis
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.errors import LeadLost, PoolFault, StoreUnavailable
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import Admission, Commit, CommitReply


async def test_sweeping_drops_the_pools_of_lost_workers(
    store: Store, redis_client: redis.Redis
) -> None:
    for incarnation in (1, 2, 2**64 - 1):
        await store.pool(incarnation, 11).open(0)
    assert await store.pools() == {1, 2, 2**64 - 1}
    assert await store.sweep(keep=[2]) == {1, 2**64 - 1}
    assert await store.pools() == {2}
    assert {key.split(b"}")[0] for key in redis_client.keys("quire:{pool:*")} == {
        b"quire:{pool:0000000000000002"
    }
    await store.sweep(keep=[])
    assert redis_client.keys("quire:{pool:*") == []


async def test_scripts_are_loaded_again_after_redis_forgot_them(
    store: Store, redis_client: redis.Redis
) -> None:
    pool = store.pool(1, 11)
    step = await pool.open(0)
    redis_client.script_flush()
    reply = await pool.commit(Commit(step + 1, admissions=(Admission(1, 0, (), 1),)))
    assert reply == CommitReply(9, (), ((1,),))
    await pool.drop()


async def test_a_dropped_connection_is_made_again(store: Store, redis_client: redis.Redis) -> None:
    pool = store.pool(1, 11)
    step = await pool.open(0)
    redis_client.client_kill_filter(_type="normal", skipme=True)
    assert await pool.commit(Commit(step + 1)) == CommitReply(10, (), ())
    await pool.drop()


async def test_a_call_without_an_answer_gives_up_and_the_next_gets_its_own(
    own_redis: EmbeddedRedis,
) -> None:
    connection = Connection.to(own_redis.url, timeout_s=0.2)
    assert await connection.execute("PING")
    with pytest.raises(StoreUnavailable, match=r"not answered for 0\.2 s"):
        await connection.execute("BLPOP", "nothing", 30)
    assert await connection.execute("ECHO", "mine") == b"mine"
    assert connection.num_calls == 3
    assert connection.waited_s > 0.1
    await connection.close()


async def test_redis_away_is_unavailable_until_it_is_back(own_redis: EmbeddedRedis) -> None:
    store = await Store.connect(own_redis.url)
    await store.take_lead("", lease_ms=3000)
    pool = store.pool(1, 11)
    step = await pool.open(0)
    own_redis.stop()
    with pytest.raises(StoreUnavailable):
        await store.renew()
    with pytest.raises(StoreUnavailable):
        await pool.commit(Commit(step + 1))
    own_redis.start()
    with pytest.raises(LeadLost, match="none"):  # it kept nothing
        await store.renew()
    with pytest.raises(PoolFault, match="not there"):
        await pool.commit(Commit(step + 1))
    await store.close()


async def test_no_redis_or_a_wrong_password_is_unavailable(
    own_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    with pytest.raises(StoreUnavailable):
        await Store.connect(f"unix://{tmp_path / 'nobody.sock'}")
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("requirepass", "right")
    with pytest.raises(StoreUnavailable, match=r"(?i)password|auth"):
        await Store.connect(own_redis.url.replace("unix://", "unix://:wrong@"))
    with pytest.raises(StoreUnavailable, match=r"(?i)auth"):
        await Store.connect(own_redis.url)
    store = await Store.connect(own_redis.url.replace("unix://", "unix://:right@"))
    await store.take_lead("", lease_ms=3000)
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
    store = await Store.connect(own_redis.url)
    await store.take_lead("", lease_ms=3000)
    pool = store.pool(1, 11)
    step = await pool.open(0)
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command(*refuse)
        with pytest.raises(StoreUnavailable):
            await store.renew()
        with pytest.raises(StoreUnavailable):
            await pool.commit(Commit(step + 1))
        client.execute_command(*allow)
    await store.renew()
    await pool.commit(Commit(step + 1))
    await store.close()


async def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme"):
        await Store.connect("localhost:6379")


async def test_calls_under_way_end_before_their_connection_is_closed(redis_url: str) -> None:
    connection = Connection.to(redis_url, timeout_s=5)
    await connection.execute("PING")
    calls = [asyncio.create_task(connection.execute("INCR", "calls")) for _ in range(3)]
    await asyncio.sleep(0)  # they have begun
    await connection.close()
    assert [await call for call in calls] == [1, 2, 3]
    await connection.execute("DEL", "calls")
    await connection.close()


async def test_a_url_does_not_choose_how_replies_are_read(own_redis: EmbeddedRedis) -> None:
    connection = Connection.to(f"{own_redis.url}?protocol=3", timeout_s=5)
    await connection.execute("HSET", "a hash", "name", "value")
    assert await connection.execute("HGETALL", "a hash") == [b"name", b"value"]
    await connection.close()


async def test_a_redis_that_takes_no_scripts_is_unavailable(own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "few", "on", ">p", "~*", "+@all", "-script")
    store = await Store.connect(own_redis.url.replace("unix://", "unix://few:p@"))
    with pytest.raises(StoreUnavailable, match="NOPERM"):
        await store.take_lead("", lease_ms=3000)
    await store.close()
