"""Decides which requests of web pages a gateway takes.

A browser sends requests of any page that its user opens to any address that it can reach. The page
can do harm in two ways, for which it needs no key where the gateway needs none. It can send a body
without asking first, if the body's type is one of HTML's forms, though it cannot read the response.
And it can give its own host name the gateway's address (DNS rebinding), and is then of the same
origin as the gateway; the requests still have its name as `Host`.
"""

import re
import socket
from typing import Final

import grpc
from starlette.datastructures import Headers

from quire.service.errors import failed

ANY_ORIGIN: Final = "*"
_NO_ORIGIN: Final = "null"
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[^\s/?#@,]+)")
# Of the gateway's own page, and of what a user enters. A page cannot set this header.
_OWN_SITES: Final = ("same-origin", "none")
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}
# Names that no server on the internet can have: RFC 6761, and ICANN's decision of 2024. Container
# engines call their host by the second, as in host.docker.internal.
_PRIVATE_SUFFIXES: Final = (".localhost", ".internal")


def parse_origins(value: str) -> tuple[str, ...]:
    """Origins as browsers write them. ValueError for a part that is none."""
    return tuple(_parse_origin(part.strip().lower()) for part in value.split(","))


def _parse_origin(value: str) -> str:
    if value in (ANY_ORIGIN, _NO_ORIGIN):
        return value
    match = _ORIGIN.fullmatch(value)
    if match is None:
        raise ValueError("must be scheme://host or scheme://host:port without a path, null or *")
    return value.removesuffix(_DEFAULT_PORTS.get(match["scheme"], ""))


class WebPages:
    """Checks requests. Those of other programs pass: they have no `Origin`, and `Host` is the name
    that they were given."""

    def __init__(self, allowed_origins: tuple[str, ...], checks_hosts: bool) -> None:
        """`checks_hosts` is for a gateway that only this machine can reach, without keys and TLS:
        it has few names, and nothing else keeps a page out whose name has its address."""
        self._origins = frozenset(allowed_origins)
        self._checks_hosts = checks_hosts and ANY_ORIGIN not in self._origins
        self._names = {_host_name(origin.partition("://")[2]) for origin in self._origins}
        self._names.add(socket.gethostname().lower())

    def check(self, method: str, headers: Headers) -> None:
        """RequestError PERMISSION_DENIED for a request that only a foreign page would send."""
        host = headers.get("host", "").lower()
        if self._checks_hosts and not self._is_own_name(_host_name(host)):
            raise failed(
                grpc.StatusCode.PERMISSION_DENIED,
                "HOST_NOT_ALLOWED",
                f"Host: is {host!r:.256}, no name of this machine; add the origin of a proxy, such "
                "as https://quire.example.com, to the gateway's --http-allowed-origins",
            )
        origin = headers.get("origin", "").lower()
        if method == "POST" and origin and not _is_json(headers) and self._is_foreign(headers):
            raise failed(
                grpc.StatusCode.PERMISSION_DENIED,
                "ORIGIN_NOT_ALLOWED",
                f"Origin: is {origin!r:.256}, that of another web page; send the body as "
                "application/json, or add the origin to the gateway's --http-allowed-origins",
            )

    def _is_own_name(self, name: str) -> bool:
        """Whether a host name is an address, or cannot be that of a page on the internet."""
        is_address = ":" in name or name.rpartition(".")[2].isdecimal()
        is_private = "." not in name or name.endswith(_PRIVATE_SUFFIXES)
        return is_address or is_private or name in self._names

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether the request's origin is another web page's. Programs that are installed, such as
        a browser's extensions, have schemes of their own."""
        origin = headers["origin"].lower()
        if ANY_ORIGIN in self._origins or origin in self._origins:
            return False
        if headers.get("sec-fetch-site") in _OWN_SITES:
            return False
        scheme, _, host = origin.partition("://")
        own = (headers.get("host", "").lower(), headers.get("x-forwarded-host", "").lower())
        return origin == _NO_ORIGIN or (scheme in _DEFAULT_PORTS and host not in own)


def _host_name(host: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_json(headers: Headers) -> bool:
    """A page of another origin has to ask before it sends this type, and is refused."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
