"""Addresses of servers, and the channel options of clients."""

import ipaddress
import re
from typing import Any, TypeAlias

from quire.client.arguments import wrong_type
from quire.service import api_keys
from quire.service.addresses import is_loopback
from quire.service.channels import channel_options

DEFAULT_TARGET = "127.0.0.1:50051"
# Detects within three seconds that a server has stopped or is unreachable during a call; servers
# permit these pings. Names are resolved again as soon as their addresses fail.
_KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # For handshakes over long distances.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
_EXPECTED = "host:port or unix:/path"
_IPV6_HINT = "; an IPv6 address is in brackets, as in [::1]:50051"
Metadata: TypeAlias = tuple[tuple[str, str], ...]
_KEY = re.compile(r"[!-~]+")
_TARGET = re.compile(r"unix:.+|(dns:///)?(\[(?P<ipv6>[^\]]+)\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_MAX_PORT = 2**16 - 1


def check_target(target: object) -> str:
    """Return the target. TypeError or ValueError for an invalid address."""
    if not isinstance(target, str):
        raise wrong_type("target", _EXPECTED, target)
    if target.startswith(("http://", "https://")):
        raise ValueError(
            f"target: expected {_EXPECTED}, the address for gRPC (got {target!r}); clients of "
            "OpenAI's API use the URL of the HTTP API"
        )
    match = _TARGET.fullmatch(target)
    if match is None or (match["ipv6"] is not None and not _is_ipv6(match["ipv6"])):
        hint = _IPV6_HINT if _is_ipv6(target) or _is_ipv6(target.rpartition(":")[0]) else ""
        raise ValueError(f"target: expected {_EXPECTED} (got {target!r}){hint}")
    if match["port"] is not None and not 0 < int(match["port"]) <= _MAX_PORT:
        # gRPC would take it modulo 65536.
        raise ValueError(f"target: the port must be 1 to {_MAX_PORT} (got {target!r})")
    return target


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def key_metadata(api_key: object) -> Metadata:
    """The metadata of calls with an API key, or of calls without one. TypeError or ValueError for
    what is none; the message does not have the key."""
    if api_key is None:
        return ()
    if not isinstance(api_key, str):
        raise TypeError(f"api_key: must be a text (got {type(api_key).__name__})")
    if not _KEY.fullmatch(api_key):
        raise ValueError("api_key: must be one word of visible ASCII characters")
    return ((api_keys.HEADER, api_keys.header_value(api_key)),)


class Targets:
    """Addresses of one or several gateways, and the one that served last."""

    def __init__(self, target: object) -> None:
        """`target` is one address, or several separated by commas. TypeError or ValueError for
        others."""
        parts = target.split(",") if isinstance(target, str) else [target]
        self.addresses = [check_target(p.strip() if isinstance(p, str) else p) for p in parts]
        self.current = self.addresses[0]

    def after(self, address: str) -> str:
        """The address to try after this one has failed; the same if it is the only one."""
        return self.addresses[(self.addresses.index(address) + 1) % len(self.addresses)]


def client_options(target: str) -> list[tuple[str, Any]]:
    """Channel options. Servers on this machine are not reached through an HTTP proxy."""
    proxy = ("grpc.enable_http_proxy", 0 if is_loopback(target) else 1)
    return [*(dict(channel_options()) | dict(_KEEPALIVE)).items(), proxy]
