"""Clients that send slowly, or more than is read, or what is not HTTP."""

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx2
import pytest
from gateway_stack import Stack
from http_client import Http

from gateway_svc.admission import http_connection

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# More than the sockets' buffers hold.
MUCH = 64 * 2**20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def connected(http: Http) -> AsyncIterator[Connection]:
    assert http.stack.gateway.http is not None
    host, _, port = http.stack.gateway.http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def response(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return int(head.split()[1]), json.loads(await reader.readexactly(int(length)))


async def send_until_closed(writer: asyncio.StreamWriter, part: bytes, pause_s: float) -> None:
    for _ in range(0, MUCH, len(part)):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize(("size", "pause_s"), [(2**20, 0), (1, 0.01)], ids=["fast", "slow"])
async def test_a_body_that_is_refused_is_not_read_for_long(
    http: Http, monkeypatch: pytest.MonkeyPatch, size: int, pause_s: float
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.2)
    monkeypatch.setattr(http_connection, "CLOSE_AFTER_S", 0.1)
    async with connected(http) as (reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % MUCH)
        status, body = await response(reader)
        assert (status, body["error"]["code"]) == (400, "request_too_large")
        with pytest.raises(ConnectionError):
            await send_until_closed(writer, bytes(size), pause_s)


async def test_a_client_that_sends_all_before_it_reads_gets_the_response(http: Http) -> None:
    """And uses the connection again."""
    body = b" " * (4 * http_connection.UNREAD_BURST_BYTES)
    refused = HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with connected(http) as (reader, writer):
        for request in (refused, refused, refused + refused):
            writer.write(request)
            await writer.drain()
            for _ in range(request.count(HEAD)):
                status, found = await response(reader)
                assert (status, found["error"]["param"]) == (415, "Content-Encoding")


async def test_headers_that_do_not_end_are_refused(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "HEADER_TIMEOUT_S", 0.2)
    async with connected(http) as (reader, writer):
        writer.write(HEAD)
        status, body = await response(reader)
        assert (status, body["error"]["code"]) == (408, "header_timeout")
        assert await reader.read() == b""
    async with connected(http) as (reader, writer):
        assert await reader.read() == b""


async def test_headers_may_wait_while_a_request_is_served(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "HEADER_TIMEOUT_S", 0.05)
    body = b'{"prompt": "The"}'
    async with connected(http) as (reader, writer):
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        writer.write(request + b"GET /vers")
        submission = await http.submission()
        http.stack.scheduler.accept(submission)
        await asyncio.sleep(0.3)
        ids = http.stack.encode("a fox")
        http.stack.scheduler.write(submission, 0, ids)
        http.stack.scheduler.end(submission, len(ids))
        status, found = await response(reader)
        assert (status, found["choices"][0]["text"]) == (200, "a fox")


async def test_what_is_not_http_gets_an_error_in_json(http: Http) -> None:
    async with connected(http) as (reader, writer):
        writer.write(b"hello\r\n\r\n")
        status, body = await response(reader)
        assert (status, body["error"]["code"]) == (400, "malformed_http")
        assert await reader.read() == b""


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (16, 16))


@pytest.mark.usefixtures("few_files")
async def test_idle_connections_leave_files_for_other_protocols(
    stack: Stack, http: Http, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncExitStack() as opened:
        idle = [await opened.enter_async_context(connected(http)) for _ in range(6)]
        for _ in range(2):
            async with connected(http) as (reader, _writer):
                with suppress(ConnectionError):
                    assert await reader.read() == b""
        assert capsys.readouterr().out.count("connections are refused") == 1
        await stack.check_next_request()
        assert not any(reader.at_eof() for reader, _ in idle)
    # There is room again, as soon as the server has noticed it.
    async with asyncio.timeout(10):
        is_served = False
        while not is_served:
            with suppress(httpx2.TransportError):
                is_served = (await http.client.get("/health")).status_code == 200
