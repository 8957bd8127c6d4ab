"""Connections to a server that takes writes."""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from redis.asyncio.connection import AbstractConnection, Connection
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.service.addresses import Lookups

# Of uvloop, for a write to a socket that the server has closed just before. Its text differs each
# time, by an address of memory, and is left out: reasons are logged once.
CLOSED: Final = RuntimeError


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

    def __init__(self, make_connection: Callable[[], AbstractConnection], lookups: Lookups) -> None:
        self._make_connection = make_connection
        self._connection = make_connection()
        self._lookups = lookups

    async def connect(self) -> asyncio.WriteTransport:
        await self.disconnect()
        # Another one reads the files of TLS again, which may have been renewed.
        self._connection = self._make_connection()
        if isinstance(self._connection, Connection):
            await self._lookups.wait_for(f"{self._connection.host}:{self._connection.port}")
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
        except CLOSED as error:
            raise RedisConnectionError("the server has closed the connection") from error
        # It has no public name. Nothing else of the client is used after this.
        writer = self._connection._writer
        assert writer is not None
        return writer.transport

    async def disconnect(self) -> None:
        await self._connection.disconnect(nowait=True)
