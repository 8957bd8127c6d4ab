"""Replies are matched to commands, however they are split and whichever callers are cancelled."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from quire.launcher.redis import EmbeddedRedis
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.errors import StoreError, StoreUnavailable
from scheduler_svc.store.links.urls import link_to
from scheduler_svc.store.resp import (
    ReplyError,
    ReplyReader,
    RespConnection,
    RespConnectionLost,
    pack,
)


def test_a_command_is_encoded_as_its_parts_after_their_lengths() -> None:
    assert pack(("SET", b"\x00\r\n", 12)) == b"*3\r\n$3\r\nSET\r\n$3\r\n\x00\r\n\r\n$2\r\n12\r\n"


REPLIES: list[tuple[bytes, Any]] = [
    (b"+OK\r\n", b"OK"),
    (b":-7\r\n", -7),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"*0\r\n", []),
    (b"$7\r\na\r\n$3\r\n\r\n", b"a\r\n$3\r\n"),
    (b"*2\r\n*2\r\n:1\r\n*1\r\n$1\r\nx\r\n*1\r\n*0\r\n", [[1, [b"x"]], [[]]]),
]


@given(st.lists(st.sampled_from(REPLIES), max_size=6), st.data())
def test_replies_are_the_same_however_their_bytes_arrive(
    replies: list[tuple[bytes, Any]], data: st.DataObject
) -> None:
    packed = b"".join(wire for wire, _ in replies)
    reader, read, start = ReplyReader(), [], 0
    while start < len(packed):
        end = data.draw(st.integers(start + 1, len(packed)))
        read += reader.feed(packed[start:end])
        start = end
    assert read == [reply for _, reply in replies]


def test_an_error_is_a_reply_also_within_an_array() -> None:
    first, [number, second] = ReplyReader().feed(b"-ERR no\r\n*2\r\n:1\r\n-OOM full\r\n")
    assert isinstance(first, ReplyError)
    assert str(first) == "ERR no"
    assert number == 1
    assert str(second) == "OOM full"


def test_malformed_data_is_refused() -> None:
    with pytest.raises(ValueError, match="no reply starts with"):
        ReplyReader().feed(b"HTTP/1.1 400\r\n")


async def test_a_cancelled_callers_reply_goes_to_no_other_caller(redis_url: str) -> None:
    connection = Connection.to(redis_url, timeout_s=5)
    await connection.execute("PING")
    lasting = [asyncio.create_task(connection.execute("ECHO", f"gone {i}")) for i in range(3)]
    await asyncio.sleep(0)  # they are written
    staying = asyncio.create_task(connection.execute("ECHO", "mine"))
    for call in lasting:
        call.cancel()
    assert await staying == b"mine"
    assert await connection.execute("ECHO", "next") == b"next"
    assert all(isinstance(e, asyncio.CancelledError) for e in await _outcomes(lasting))
    await connection.close()


async def test_a_cancelled_call_is_executed_before_the_next_one(redis_url: str) -> None:
    connection = Connection.to(redis_url, timeout_s=5)
    await connection.execute("DEL", "carried out")
    call = asyncio.create_task(connection.execute("INCR", "carried out"))
    await asyncio.sleep(0)
    call.cancel()
    assert await connection.execute("INCR", "carried out") == 2
    await connection.execute("DEL", "carried out")
    await connection.close()


async def test_a_caller_that_is_cancelled_while_it_connects_leaves_a_usable_connection(
    redis_url: str,
) -> None:
    connection = Connection.to(redis_url, timeout_s=5)
    for num_yields in range(20):
        call = asyncio.create_task(connection.execute("ECHO", "gone"))
        for _ in range(num_yields):
            await asyncio.sleep(0)
        was_done = call.done()
        call.cancel()
        await _outcomes([call])
        assert was_done or call.cancelled()
        assert await connection.execute("ECHO", f"{num_yields}") == b"%d" % num_yields
        await connection.close()


async def test_a_caller_that_is_cancelled_while_its_connecting_fails_is_cancelled(
    tmp_path: Path,
) -> None:
    """Otherwise a retry loop would never end."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    path = tmp_path / "s"
    async with await asyncio.start_unix_server(hang_up, path):
        for num_yields in range(20):
            connection = Connection.to(f"unix://{path}", timeout_s=5)
            call = asyncio.create_task(connection.execute("PING"))
            for _ in range(num_yields):
                await asyncio.sleep(0)
            was_done = call.done()
            call.cancel()
            await _outcomes([call])
            assert was_done or call.cancelled()
            await connection.close()


async def test_calls_in_progress_are_retried_when_their_connection_is_lost(
    redis_url: str, redis_client: redis.Redis
) -> None:
    connection = Connection.to(redis_url, timeout_s=5)
    number = await connection.execute("CLIENT", "ID")
    waiting = asyncio.create_task(connection.execute("BLPOP", "a list", 30))
    behind = asyncio.create_task(connection.execute("ECHO", "mine"))
    for _ in range(100):
        await asyncio.sleep(0.01)
        if any(client["cmd"] == "blpop" for client in redis_client.client_list()):
            break
    redis_client.client_kill_filter(_id=number)
    redis_client.rpush("a list", "found")
    assert await waiting == [b"a list", b"found"]
    assert await behind == b"mine"
    await connection.close()


async def test_a_call_after_one_that_times_out_gets_its_own_reply(
    own_redis: EmbeddedRedis,
) -> None:
    connection = Connection.to(own_redis.url, timeout_s=0.4)
    slow = asyncio.create_task(connection.execute("BLPOP", "nothing", 30))
    await asyncio.sleep(0.3)
    assert await connection.execute("ECHO", "mine") == b"mine"
    with pytest.raises(StoreUnavailable):
        await slow
    await connection.close()


async def test_an_error_in_a_transaction_is_raised(redis_url: str) -> None:
    connection = Connection.to(redis_url, timeout_s=5)
    assert await connection.snapshot(("SET", "text", "x"), ("GET", "text")) == [b"OK", b"x"]
    with pytest.raises(StoreError):
        await connection.snapshot(("GET", "text"), ("INCR", "text"))
    assert await connection.execute("DEL", "text") == 1
    await connection.close()


def test_a_call_over_a_connection_that_is_lost_fails(redis_url: str) -> None:
    """uvloop has an error of its own for a write to a closed socket."""

    async def call() -> None:
        connection = RespConnection(await link_to(redis_url, 5).connect(), timeout_s=5)
        connection.drop()
        await asyncio.sleep(0.01)
        with pytest.raises(RespConnectionLost):
            await connection.send([pack(["PING"])])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(call())


async def _outcomes(calls: list[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)
