import asyncio
import socket
from pathlib import Path

import pytest

from quire.service.addresses import can_connect, check_address, is_http_url, reserve


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:0", "localhost:65535", "a-b.c:1", "[::1]:50051", "unix:/a/b.sock", "unix:///a b"],
)
def test_a_valid_address_is_unchanged(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", "127.0.0.1", "127.0.0.1:", ":50051", "localhost:65536", "localhost:99999"),
        *("a:b", "a:-1", "a b:1", "::1:50051", "[zz]:1", "[127.0.0.1]:1", "unix:", "unix:a.sock"),
        *("http://a:1", "a:1/b", "a:1\n", "a..b:1", ".a:1", f"{64 * 'a'}:1"),
    ],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        check_address(address)


def test_a_url_of_http_has_a_host_and_a_port_that_can_exist() -> None:
    for url in ("http://a", "https://a.b:1/v1", "http://[::1]:80", "http://é.invalid/"):
        assert is_http_url(url), url
    for rest in ("", ":80", "a:b", "a:0", "a:65536", "[::1", "a\nb", "a..b"):
        assert not is_http_url(f"http://{rest}"), rest
    assert not is_http_url("localhost:80")


def test_an_address_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}: Address already in use"):
            reserve(address)
    with reserve(address), pytest.raises(OSError, match="Address already in use"):
        reserve(f"localhost:{address.rpartition(':')[2]}")
    reserve(address).close()


def test_addresses_that_no_server_can_have(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:80: Cannot assign requested"):
        reserve("192.0.2.1:80")
    with pytest.raises(OSError, match=r"cannot listen on no\.invalid:80: "):
        reserve("no.invalid:80")
    (tmp_path / "file").touch()
    for folder, reason in (("absent", "No such file or directory"), ("file", "Not a directory")):
        with pytest.raises(OSError, match=rf"cannot listen on unix:.*{folder}: {reason}"):
            reserve(f"unix:{tmp_path}/{folder}/socket")
    assert reserve(f"unix:{tmp_path}/socket") is None
    assert reserve("127.0.0.1:0") is None


async def test_a_server_is_reached_where_it_listens(tmp_path) -> None:
    path = tmp_path / "s"

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # An open connection holds up `wait_closed` until its writer is collected as garbage.
        writer.close()

    server = await asyncio.start_unix_server(connected, path)
    tcp = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = tcp.sockets[0].getsockname()[1]
    for address in (f"unix:{path}", f"127.0.0.1:{port}"):
        assert await can_connect(address)
    tcp.close()
    server.close()
    await asyncio.gather(tcp.wait_closed(), server.wait_closed())
    for address in (f"unix:{path}-absent", f"127.0.0.1:{port}", "no port"):
        assert not await can_connect(address)
