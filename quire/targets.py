"""How a client reaches a server."""

import ipaddress
import re
from typing import Any

from quire.arguments import wrong_type
from quire.service.channels import channel_options

DEFAULT_TARGET = "127.0.0.1:50051"
# Notices in two or three seconds that a server has stopped or is cut off while a call waits for
# it; servers permit it. Names are looked up again as soon as their addresses are gone.
_WATCHFUL: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
_EXPECTED = "host:port or unix:/path"
_TARGET = re.compile(r"unix:.+|(dns:///)?(\[[^\]]+\]|[^\s:/\[\]]+):\d{1,5}")


def check_target(target: object) -> str:
    """The target; TypeError or ValueError for what is no server's address."""
    if not isinstance(target, str):
        raise wrong_type("target", _EXPECTED, target)
    if not _TARGET.fullmatch(target):
        raise ValueError(f"target: expected {_EXPECTED} (got {target!r})")
    return target


class Targets:
    """One server's address, or those of several gateways of one service, and who served last."""

    def __init__(self, target: object) -> None:
        """TypeError or ValueError for what is no address, nor several with commas between them."""
        parts = target.split(",") if isinstance(target, str) else [target]
        self.addresses = [check_target(_stripped(part)) for part in parts]
        self.current = self.addresses[0]

    def after(self, address: str) -> str:
        """Whom to ask where this one has failed; itself, if it is the only one."""
        return self.addresses[(self.addresses.index(address) + 1) % len(self.addresses)]


def client_options(target: str) -> list[tuple[str, Any]]:
    """Channel options; a server on this machine is never asked for through an HTTP proxy."""
    proxy = ("grpc.enable_http_proxy", 0 if _is_local(target) else 1)
    return [*(dict(channel_options()) | dict(_WATCHFUL)).items(), proxy]


def _stripped(part: object) -> object:
    return part.strip() if isinstance(part, str) else part


def _is_local(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    if target.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
