"""The link that a URL of Redis stands for."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio.connection import ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from quire.service.addresses import Lookups
from scheduler_svc.store.links.link import Link, ServerLink
from scheduler_svc.store.links.nodes import find_node
from scheduler_svc.store.links.sentinels import find_primary
from scheduler_svc.store.links.servers import GroupLink, Servers

_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}
_DEFAULT_SERVICE = "mymaster"
_SENTINEL_PREFIX = "sentinel_"
_NO_ADDRESS = (
    "the URL of Redis has no valid host and port; an IPv6 address is in brackets, as in "
    "redis://[::1]:6379/0, and a character such as / in a password is written as %2F"
)


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
        return ServerLink(ConnectionPool(**of_url).make_connection, Lookups())
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
    servers.cluster(servers.addresses)
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
) -> Servers:
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
    return Servers(
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
