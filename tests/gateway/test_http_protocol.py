"""The bytes of HTTP connections: offers of other protocols, and headers without an end."""

import asyncio

import pytest
from http_client import Http

BODY = b'{"prompt": "a fox"}'
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
MUCH = b"a" * 2**16


async def exchange(http: Http, *parts: bytes) -> bytes:
    """Send the parts, each once the one before may have been read; return what is received up to
    the end of the connection, or of the first response's body."""
    url = http.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await http.client.get("/health")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await reader.readexactly(length)
    finally:
        writer.close()


async def test_an_offer_of_another_protocol_is_ignored(http: Http) -> None:
    for offer in (OFFER, OFFER.replace(b"h2c", b"websocket"), b""):
        data = HEAD + offer + LENGTH + BODY
        for cut in (0, len(HEAD), len(HEAD) + 30, -1, -3):
            parts = (data[:cut], data[cut:]) if cut else (data,)
            response = await exchange(http, *parts)
            assert response.startswith(b"HTTP/1.1 200 OK"), (offer, cut)
            assert b'"count":' in response


async def test_an_offer_leaves_the_other_options_of_the_connection(http: Http) -> None:
    closing = OFFER.replace(b"Upgrade,", b"close, upgrade,")
    response = await exchange(http, HEAD + closing + LENGTH + BODY)
    assert b"\r\nconnection: close\r\n" in response.lower()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert b"200 OK" in await exchange(http, HEAD + OFFER + chunked)
    assert b"400 Bad" in await exchange(http, b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD + b"A: ", MUCH),
        (HEAD, *[b"A%d: %b\r\n" % (i, b"a" * 4000) for i in range(17)]),
        (b"GET /", MUCH),
    ],
    ids=["one", "many", "path"],
)
async def test_headers_are_limited(http: Http, parts: tuple[bytes, ...]) -> None:
    """httptools would keep them, before a key is looked at."""
    response = await exchange(http, *parts)
    assert response.startswith(b"HTTP/1.1 431 ")
    assert b"more than 65536 bytes" in response


async def test_trailers_are_limited(http: Http) -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await exchange(http, chunked, b"A: " + MUCH)


async def test_large_headers_and_bodies_are_served(http: Http) -> None:
    large = b"A: " + b"a" * 60_000 + b"\r\n"
    assert b"200 OK" in await exchange(http, HEAD + large + LENGTH, BODY)
    body = b" " * 100_000 + BODY
    data = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    parts = [body[i : i + 10_000] for i in range(0, len(body), 10_000)]
    assert b"200 OK" in await exchange(http, data, *parts)
