"""How a client reaches a server."""

import ipaddress
import re
from typing import Any

from quire.arguments import wrong_type
from quire.service.channels import channel_options

DEFAULT_TARGET = "127.0.0.1:50051"
_EXPECTED = "host:port or unix:/path"
_TARGET = re.compile(r"unix:.+|(dns:///)?(\[[^\]]+\]|[^\s:/\[\]]+):\d{1,5}")


def check_target(target: object) -> None:
    """TypeError or ValueError for what is no server's address."""
    if not isinstance(target, str):
        raise wrong_type("target", _EXPECTED, target)
    if not _TARGET.fullmatch(target):
        raise ValueError(f"target: expected {_EXPECTED} (got {target!r})")


def client_options(target: str) -> list[tuple[str, Any]]:
    """Channel options; a server on this machine is never asked for through an HTTP proxy."""
    return [*channel_options(), ("grpc.enable_http_proxy", 0 if _is_local(target) else 1)]


def _is_local(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    if target.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
