"""Connects to Redis where the URL says it is: one server, the primary that Sentinels name, or the
node of a Redis Cluster that has the scheduler's keys.

redis-py only finds the server and connects, as the URL demands; `RespConnection` then takes over
the socket, since the client's own overhead is several times the cost of a call.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError

from quire.service.addresses import Lookups

_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}
_DEFAULT_SERVICE = "mymaster"
_SENTINEL_PREFIX = "sentinel_"
_NO_ADDRESS = (
    "the URL of Redis has no valid host and port; an IPv6 address is in brackets, as in "
    "redis://[::1]:6379/0, and a character such as / in a password is written as %2F"
)
# Of the time to connect, for each node of a cluster that is asked where the keys are.
_SHARE_OF_NODE = 1 / 4
# Of uvloop, for a write to a socket that the server has closed just before. Its text differs each
# time, by an address of memory, and is left out: reasons are logged once.
_CLOSED = RuntimeError
# For other Sentinels to respond, once one has named a primary.
_FOR_OTHERS_S = 0.1


class Link(Protocol):
    """Opens connections to the server that takes writes. Each call searches again."""

    async def connect(self) -> asyncio.WriteTransport:
        """An authenticated connection without unread data. RedisError or OSError without one."""
        ...

    async def disconnect(self) -> None:
        """Forget the last connection."""
        ...


class ServerLink:
    """One server."""

    def __init__(self, make_connection: Callable[[], AbstractConnection]) -> None:
        self._make_connection = make_connection
        self._connection = make_connection()
        self._lookups = Lookups()

    async def connect(self) -> asyncio.WriteTransport:
        await self.disconnect()
        # Another one reads the files of TLS again, which may have been renewed.
        self._connection = self._make_connection()
        if isinstance(self._connection, Connection):
            await self._lookups.wait_for(f"{self._connection.host}:{self._connection.port}")
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
        except _CLOSED as error:
            raise RedisConnectionError("the server has closed the connection") from error
        # It has no public name. Nothing else of the client is used after this.
        writer = self._connection._writer
        assert writer is not None
        return writer.transport

    async def disconnect(self) -> None:
        await self._connection.disconnect(nowait=True)


@dataclass(frozen=True)
class _Servers:
    """A URL that names several servers."""

    addresses: Sequence[tuple[str, int]]
    uses_tls: bool
    # The monitored service of Sentinels.
    service: str
    # The key whose node is wanted, of a cluster.
    key: str
    # For connections to Redis itself, and to Sentinels.
    options: Mapping[str, Any]
    sentinel_options: Mapping[str, Any]

    def server(self, host: str, port: int) -> ServerLink:
        """A link to one of them, or to a server that they name."""
        kind = SSLConnection if self.uses_tls else Connection
        return ServerLink(lambda: kind(host=host, port=port, **self.options))

    def sentinel(self, host: str, port: int) -> Redis:
        """A client of one of them, a Sentinel."""
        return Redis(host=host, port=port, ssl=self.uses_tls, **self.sentinel_options)

    def cluster(self) -> RedisCluster:
        """A client of the cluster that they are nodes of."""
        options = {name: value for name, value in self.options.items() if name != "db"}
        # A node that hangs leaves time to ask others.
        for name in ("socket_timeout", "socket_connect_timeout"):
            options[name] *= _SHARE_OF_NODE
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self.addresses],
            ssl=self.uses_tls,
            # Other slots are not of interest.
            require_full_coverage=False,
            **options,
        )


class _Named(NamedTuple):
    """A primary, by a Sentinel."""

    address: tuple[str, int]
    # Greater after each failover.
    config_epoch: int


class GroupLink:
    """The server that takes writes, of several."""

    def __init__(
        self, servers: _Servers, find: Callable[[_Servers], Awaitable[tuple[str, int]]]
    ) -> None:
        """`find` asks them for its address."""
        self._servers = servers
        self._find = find
        self._link: ServerLink | None = None

    async def connect(self) -> asyncio.WriteTransport:
        self._link = self._servers.server(*await self._find(self._servers))
        return await self._link.connect()

    async def disconnect(self) -> None:
        if self._link is not None:
            await self._link.disconnect()


async def find_primary(servers: _Servers) -> tuple[str, int]:
    """The primary of the newest configuration that a Sentinel has.

    All of them are asked at once: one that hangs would take the time of those after it, and one
    that was cut off from the others may still name the primary before a failover.
    """
    asked = [asyncio.create_task(_ask(servers, *address)) for address in servers.addresses]
    pending = set(asked)
    found: list[_Named] = []
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending,
                timeout=_FOR_OTHERS_S if found else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                break
            results = [task.result() for task in done]
            found += [result for result in results if isinstance(result, _Named)]
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    if not found:
        # In the order of the URL, whichever responds first: reasons are logged once.
        reasons = "; ".join(str(task.result()) for task in asked)
        raise RedisConnectionError(f"no Sentinel names a primary of {servers.service!r}: {reasons}")
    return max(found, key=lambda named: named.config_epoch).address


async def _ask(servers: _Servers, host: str, port: int) -> _Named | str:
    """The primary that a Sentinel names, or why it names none."""
    client = servers.sentinel(host, port)
    try:
        # By their names, unlike the type of newer protocols.
        masters: Any = await client.sentinel_masters()
    except _CLOSED:
        return f"{host}:{port} has closed the connection"
    except (RedisError, OSError) as error:
        return f"{host}:{port}: {error}"
    finally:
        await client.aclose()
    state = masters.get(servers.service)
    if state is None:
        return f"{host}:{port} does not monitor it"
    if not state["is_master"] or state["is_sdown"] or state["is_odown"]:
        return f"{host}:{port}: {state['ip']}:{state['port']} is down"
    return _Named((state["ip"], state["port"]), state["config-epoch"])


async def find_node(servers: _Servers) -> tuple[str, int]:
    """The node of a cluster with the slot of the key."""
    cluster = servers.cluster()
    nodes = cluster.nodes_manager
    try:
        # Not `cluster.initialize()`: it asks the first primary for its commands, and fails while
        # that one is dead, though it has other slots.
        await nodes.initialize()
        node = cluster.get_node_from_key(servers.key)
    except RedisClusterException as error:
        # It is no RedisError.
        raise RedisConnectionError(_with_reason(error)) from error
    except IndexError as error:
        # The client takes a first primary for granted.
        raise RedisConnectionError("no node of the Redis Cluster has slots") from error
    finally:
        # To the end if it is cancelled meanwhile: the client logs connections that stay open.
        closing = (nodes.aclose("startup_nodes"), nodes.aclose())
        await asyncio.shield(asyncio.gather(*closing, return_exceptions=True))
    assert node is not None
    return str(node.host), int(node.port)


def _with_reason(error: BaseException) -> str:
    """The message with that of the error behind it, such as a right that is missing: the client
    reports whatever a node refuses as a node that is in no cluster."""
    first: BaseException = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    return str(error) if str(first) in str(error) else f"{error} ({first})"


def link_to(url: str, timeout_s: float, password: str | None = None, key: str = "") -> Link:
    """A link that connects within `timeout_s` to each server; of a cluster, to the node that has
    the key. ValueError for an invalid URL, without its password. `password` is used if the URL has
    none."""
    try:
        return _link_to(url, timeout_s, password, key)
    except (TypeError, AttributeError, RedisError) as error:
        # An unknown parameter becomes an unknown argument, and the text of one that cannot be a
        # text, such as `retry`, lacks a method.
        raise ValueError(
            f"the URL of Redis has a parameter that cannot be used: {error}"
        ) from error


def _link_to(url: str, timeout_s: float, password: str | None, key: str) -> Link:
    _check_database(url)
    scheme, _, kind = urlsplit(url).scheme.partition("+")
    options = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
    }
    if not kind:
        # A URL may ask for another protocol, which `RespConnection` does not read.
        of_url: dict[str, Any] = {"password": password, **options, **parse_url(url), "protocol": 2}
        return ServerLink(ConnectionPool(**of_url).make_connection)
    if scheme not in ("redis", "rediss") or kind not in _DEFAULT_PORTS:
        raise ValueError(
            f"the URL of Redis begins with {scheme}+{kind}://; redis:// and rediss:// "
            "may have +sentinel or +cluster"
        )
    servers = _parse(url, scheme, _DEFAULT_PORTS[kind], options, password, key)
    # Like one server's, its parameters are refused now and not by each attempt to connect.
    servers.server(*servers.addresses[0])
    if kind == "sentinel":
        servers.sentinel(*servers.addresses[0])
        return GroupLink(servers, find_primary)
    servers.cluster()
    return GroupLink(servers, find_node)


def _split(url: str) -> SplitResult:
    """The parts of a URL. ValueError for a host or port that is none: Python's own message may
    quote a part of the password."""
    try:
        parts = urlsplit(url)
        # Those of Sentinels and clusters have several hosts.
        _ = "+" in parts.scheme or parts.port
    except ValueError:
        raise ValueError(_NO_ADDRESS) from None
    return parts


def _check_database(url: str) -> None:
    """ValueError for a database that redis-py would replace by the first one, which may be another
    installation's."""
    parts = _split(url)
    scheme, _, kind = parts.scheme.partition("+")
    named = [value for name, value in parse_qsl(parts.query) if name == "db"]
    if kind != "sentinel" and scheme != "unix":
        named += [parts.path.strip("/")] if parts.path.strip("/") else []
    if any(not (value.isascii() and value.isdigit()) for value in named):
        raise ValueError(f"the URL of Redis has no number of a database in {named[-1]!r}")
    if kind == "cluster" and any(int(value) for value in named):
        raise ValueError(f"a Redis Cluster has no database {named[-1]}, only 0")


def _parse(
    url: str,
    scheme: str,
    default_port: int,
    options: Mapping[str, Any],
    password: str | None,
    key: str,
) -> _Servers:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    addresses = [_address(host, default_port) for host in hosts.split(",")]
    query = parse_qsl(parts.query)
    of_sentinels = [
        (name.removeprefix(_SENTINEL_PREFIX), value)
        for name, value in query
        if name.startswith(_SENTINEL_PREFIX)
    ]
    of_redis = [pair for pair in query if not pair[0].startswith(_SENTINEL_PREFIX)]
    tls = [pair for pair in of_redis if pair[0].startswith("ssl_")]

    def parsed(user: str, query: Sequence[tuple[str, str]]) -> dict[str, Any]:
        at = f"{user}@" if user else ""
        found = parse_url(f"{scheme}://{at}localhost?{urlencode(query)}")
        apart = ("host", "connection_class")
        return {**options, **{k: v for k, v in found.items() if k not in apart}}

    of_url = parsed(credentials, of_redis)
    # A URL may ask for another protocol, which `RespConnection` does not read.
    redis_options = {"password": password, **of_url, "protocol": 2}
    return _Servers(
        addresses=addresses,
        uses_tls=scheme == "rediss",
        service=unquote(parts.path.strip("/")) or _DEFAULT_SERVICE,
        key=key,
        options=redis_options,
        sentinel_options=parsed("", [*of_sentinels, *tls]),
    )


def _address(host: str, default_port: int) -> tuple[str, int]:
    """ValueError unless it is host or host:port."""
    try:
        one = urlsplit(f"//{host}")
        port = one.port or default_port
    except ValueError:
        raise ValueError(_NO_ADDRESS) from None
    if not one.hostname:
        raise ValueError(f"the URL of Redis has no host in {host!r}")
    return one.hostname, port
