"""Sockets of servers."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from quire.service.addresses import host

_UNIX: Final = "unix:"
# As gRPC does it, either of these stands for all addresses of both families.
WILDCARDS: Final = frozenset({"0.0.0.0", "::"})


@contextmanager
def naming_address(listen: str) -> Iterator[None]:
    """Name the address in an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot listen on {listen}: {error.strerror or error}") from error


def bind(listen: str) -> list[socket.socket]:
    """Bind `host:port` or `unix:/path`: a socket for each address of the host, all with the same
    port; port 0 is a free one. OSError if there is none."""
    with naming_address(listen):
        if listen.startswith(_UNIX):
            return [_bind_unix(listen.removeprefix(_UNIX))]
        port = int(listen.rpartition(":")[2])
        if host(listen) in WILDCARDS and socket.has_dualstack_ipv6():
            return [_bind_wildcard(port)]
        return _bind_all(host(listen), port)


def _bind_unix(path: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    try:
        # Of a server that was killed.
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
        bound.bind(path)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_wildcard(port: int) -> socket.socket:
    try:
        return _bind_one(socket.AF_INET6, ("::", port), is_dualstack=True)
    except OSError:
        # A machine without IPv6, or the port is in use, which this reports.
        return _bind_one(socket.AF_INET, ("0.0.0.0", port))


def _bind_all(name: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            bound.append(_bind_one(family, (address[0], port, *address[2:])))
        except OSError as error:
            failure = error
        else:
            port = bound[0].getsockname()[1]
    if failure is not None and not bound:
        raise failure
    return bound


def _bind_one(
    family: int, address: tuple[str | int, ...], is_dualstack: bool = False
) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_dualstack)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
