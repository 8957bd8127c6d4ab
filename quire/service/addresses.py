"""Addresses as settings have them: `host:port` or `unix:/path`."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

_HOST_AND_PORT = re.compile(r"(?P<host>[^\s:/\[\]]+|\[(?P<ipv6>[^\s\]]+)\]):(?P<port>[0-9]{1,5})")
_UNIX = re.compile(r"unix:/.+")
_MAX_PORT = 2**16 - 1


def check_address(value: str) -> str:
    """ValueError for what gRPC would refuse, or take for something else: without a port it takes
    443, and a port beyond the last modulo 65536.
    """
    if _UNIX.fullmatch(value):
        return value
    match = _HOST_AND_PORT.fullmatch(value)
    if match is None:
        raise ValueError("must be host:port, [IPv6 address]:port or unix:/path")
    if match["ipv6"] is not None:
        ipaddress.IPv6Address(match["ipv6"])
    if int(match["port"]) > _MAX_PORT:
        raise ValueError(f"must have a port from 0 to {_MAX_PORT}")
    return value


Address = Annotated[str, AfterValidator(check_address)]
