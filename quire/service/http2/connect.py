"""Opens the connection of a call."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from quire.service.addresses import CONNECT_TIMEOUT_S, host
from quire.service.tls import TLS, TLSError

_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)
_UNIX = "unix:"


async def connect(
    protocol: Callable[[], _Protocol], address: str, tls: TLS | None, name: str | None = None
) -> _Protocol:
    """Connect to `host:port` or `unix:/path`. `name` is the name that an IP address stands for:
    with TLS the certificate has it. A unix socket has no TLS. OSError if it fails, TLSError if the
    files cannot be used."""
    loop = asyncio.get_running_loop()
    if address.startswith(_UNIX):
        return (await loop.create_unix_connection(protocol, address.removeprefix(_UNIX)))[1]
    port = int(address.rpartition(":")[2])
    if tls is None:
        return (await loop.create_connection(protocol, host(address), port))[1]
    context = tls.ssl_context()
    context.set_alpn_protocols(["h2"])
    server_name = tls.server_name or name or host(address)
    _, connected = await loop.create_connection(
        protocol, host(address), port, ssl=context, server_hostname=server_name
    )
    return connected


async def find_obstacle(address: str, tls: TLS | None, name: str | None) -> str:
    """Why no connection can be opened, which a channel of gRPC does not say; empty if one can. A
    client's certificate that the server refuses is no obstacle yet."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await connect(_Closing, address, tls, name)
    except TimeoutError:
        return "no response"
    except (OSError, TLSError) as error:
        return str(error)
    return ""


class _Closing(asyncio.Protocol):
    """Closes its connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def authority(address: str) -> str:
    """What a request to the address names as its target."""
    return "localhost" if address.startswith(_UNIX) else address
