"""Addresses of services, `host:port` or `unix:/path`: checks them and resolves their names."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import structlog
from pydantic import AfterValidator

log = structlog.get_logger()

LOOKUP_INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 1.0
_HOST_AND_PORT = re.compile(r"(?P<host>[^\s:/\[\]]+|\[(?P<ipv6>[^\s\]]+)\]):(?P<port>[0-9]{1,5})")
_UNIX = re.compile(r"unix:/.+")
_MAX_PORT = 2**16 - 1

_Result = TypeVar("_Result")


def check_address(value: str) -> str:
    """Return the address. ValueError for one that gRPC would refuse or change: it adds the port
    443 where there is none, and takes a port modulo 65536."""
    if _UNIX.fullmatch(value):
        return value
    match = _HOST_AND_PORT.fullmatch(value)
    if match is None:
        raise ValueError("must be host:port, [IPv6 address]:port or unix:/path")
    if match["ipv6"] is not None:
        ipaddress.IPv6Address(match["ipv6"])
    elif not _is_name(match["host"]):
        raise ValueError("must have a host whose parts between dots have 1 to 63 characters")
    if int(match["port"]) > _MAX_PORT:
        raise ValueError(f"must have a port from 0 to {_MAX_PORT}")
    return value


def _is_name(host: str) -> bool:
    """Whether a host can be resolved: Python has an error for some, which no socket has."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def is_http_url(url: str) -> bool:
    """Whether a client of HTTP can use a URL: it has a host, and a port that can exist or none."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    is_server = name != "" and _is_name(name) and port != 0
    return url.isprintable() and parts.scheme in ("http", "https") and is_server


def host(address: str) -> str:
    """The host of `host:port`, an IPv6 one without brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a server that listens on the address."""
    if address.startswith("unix:") or host(address) == "localhost":
        return True
    try:
        return ipaddress.ip_address(host(address)).is_loopback
    except ValueError:
        return False


def reserve(address: str) -> socket.socket | None:
    """Keep an address from other servers until the socket is closed. OSError, with the reason, if
    no server can listen on it now. None for port 0, and for a unix socket, of which the folder
    alone is checked."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        _check_folder(Path(address.removeprefix("unix:")).parent, address)
        return None
    if port == "0":
        return None
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in found:
            try:
                return _listen(socket.socket(family, kind, protocol), place)
            except OSError as error:
                failure = error
    except OSError as error:
        failure = error
    assert failure is not None, "getaddrinfo returns an address or fails"
    reason = failure.strerror or failure
    raise OSError(failure.errno, f"cannot listen on {address}: {reason}") from failure


def _check_folder(folder: Path, address: str) -> None:
    reason = 0 if os.access(folder, os.W_OK | os.X_OK) else errno.EACCES
    if not folder.is_dir():
        reason = errno.ENOTDIR if folder.exists() else errno.ENOENT
    if reason:
        raise OSError(reason, f"cannot listen on {address}: {folder}: {os.strerror(reason)}")


def _listen(probe: socket.socket, place: tuple[object, ...]) -> socket.socket:
    try:
        # As servers do, so that connections of an earlier server do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        # With that option the kernel refuses an address that another socket listens on, alone.
        probe.listen(1)
    except OSError:
        probe.close()
        raise
    return probe


async def can_connect(address: str) -> bool:
    """Whether a server accepts a connection within a second. It gets no data."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if address.startswith("unix:"):
                _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                port = int(address.rpartition(":")[2])
                _, writer = await asyncio.open_connection(host(address), port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True


Address = Annotated[str, AfterValidator(check_address)]


class Lookups:
    """Looks names up, each in a thread of its own. A lookup whose caller was cancelled is continued
    by the next call, so that a name whose server hangs has one thread, however often it is asked.
    """

    def __init__(self) -> None:
        # In progress, by name.
        self._running: dict[str, asyncio.Task[frozenset[str]]] = {}

    async def resolve(self, name: str) -> frozenset[str]:
        """The addresses of `host:port`. OSError or UnicodeError if it has none."""
        if name not in self._running:
            self._running[name] = asyncio.create_task(_resolve(name))
            self._running[name].add_done_callback(partial(self._end, name))
        return await asyncio.shield(self._running[name])

    async def wait_for(self, name: str) -> None:
        """Wait for the response of the name server, be it an error. A lookup by the loop's own
        threads, which are few and not cancelled, is short then."""
        with contextlib.suppress(OSError, UnicodeError):
            await self.resolve(name)

    def _end(self, name: str, lookup: "asyncio.Task[frozenset[str]]") -> None:
        del self._running[name]
        if not lookup.cancelled():
            # Without a caller that reads it, asyncio would log an error.
            lookup.exception()


class NameResolver:
    """Resolves each name once a second while `run` runs, concurrently.

    A name that fails to resolve keeps its last addresses. One whose name server hangs delays no
    other, nor the end of the process.
    """

    def __init__(self, names: Iterable[str], on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called after the addresses of a name have changed."""
        self._resolved = {
            name: frozenset({name} if name.startswith("unix:") else ()) for name in names
        }
        self._on_change = on_change
        # A failure is logged once per outage, also if `run` is called again.
        self._failing: set[str] = set()
        self._lookups = Lookups()

    @property
    def addresses(self) -> frozenset[str]:
        """The addresses of all names, as last resolved."""
        return frozenset().union(*self._resolved.values())

    def host_of(self, address: str) -> str:
        """The configured host that resolves to an address, as in a certificate for TLS."""
        names = (name for name, addresses in self._resolved.items() if address in addresses)
        return host(next(names, address))

    async def run(self) -> None:
        """Resolve until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self._resolved:
                if not name.startswith("unix:"):
                    group.create_task(self._keep_resolved(name))

    async def _keep_resolved(self, name: str) -> None:
        while True:
            try:
                addresses = await self._lookups.resolve(name)
            except (OSError, UnicodeError) as error:
                if name not in self._failing:
                    log.warning("name does not resolve", name=name, reason=str(error))
                self._failing.add(name)
            else:
                self._failing.discard(name)
                if addresses != self._resolved[name]:
                    self._resolved[name] = addresses
                    self._on_change()
            await asyncio.sleep(LOOKUP_INTERVAL_S)


async def _resolve(name: str) -> frozenset[str]:
    port = name.rpartition(":")[2]
    look_up = partial(socket.getaddrinfo, host(name), int(port), type=socket.SOCK_STREAM)
    try:
        # An IP address needs no name server, and no thread.
        infos = look_up(flags=socket.AI_NUMERICHOST)
    except OSError:
        infos = await _in_own_thread(look_up)
    return frozenset(_target(address, port) for *_, address in infos)


async def _in_own_thread(call: Callable[[], _Result]) -> _Result:
    """Call in a thread that ends with the process at the latest. The loop's own are few: calls that
    hang would keep them from all others, and the loop from its end."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_Result] = loop.create_future()

    def run() -> None:
        end: Callable[[], None]
        try:
            end = partial(result.set_result, call())
        except Exception as error:
            end = partial(result.set_exception, error)
        # The loop may have been closed, and the caller cancelled.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if result.done() else end())

    Thread(target=run, name="name lookup", daemon=True).start()
    return await result


def _target(address: tuple[object, ...], port: str) -> str:
    match address:
        case ip, _, _, 0:
            return f"[{ip}]:{port}"
        case ip, _, _, int(interface):
            # Of a link-local address, which is not reached without it.
            return f"[{ip}%{interface}]:{port}"
        case _:
            return f"{address[0]}:{port}"
