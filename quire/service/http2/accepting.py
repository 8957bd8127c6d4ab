"""Accepts connections; those beyond a limit are closed before anything is spent on them."""

import asyncio
import contextlib
import errno
import resource
import ssl
import sys
from collections.abc import Callable
from socket import AF_UNIX, IPPROTO_TCP, TCP_NODELAY, socket
from typing import Final

import structlog

log = structlog.get_logger()

# Of connections that are not accepted yet. The system drops others, whose clients try again after a
# second.
BACKLOG: Final = 2048
_HANDSHAKE_TIMEOUT_S: Final = 10.0
# The process or the machine lacks files or memory for another connection.
_LACKING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_S: Final = 1.0


def share_of_files(share: float) -> int:
    """A share of the number of files that this process may open."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if max_files == resource.RLIM_INFINITY else int(max_files * share)


class Acceptor:
    """Accepts the connections of listening sockets. One whose handshake goes on counts as well."""

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        num_open: Callable[[], int],
        max_connections: int,
    ) -> None:
        """`num_open`: of the connections whose handshake is over."""
        self._make_protocol = make_protocol
        self._num_open = num_open
        self._max_connections = max_connections
        # Whether that was reported.
        self._is_full = False
        self._sockets: list[socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()

    def listen(self, bound: socket, context: ssl.SSLContext | None) -> None:
        """Accept connections of a socket that is bound, with TLS if there is a context."""
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._sockets.append(bound)
        self._tasks.append(asyncio.create_task(self._accept(bound, context)))

    async def close(self) -> None:
        """Accept nothing more, and end handshakes."""
        tasks = [*self._tasks, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for bound in self._sockets:
            bound.close()

    async def _accept(self, bound: socket, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(bound)
            except OSError as error:
                # Otherwise the client has gone.
                if error.errno in _LACKING:
                    log.error("connections cannot be accepted", reason=str(error))
                    await asyncio.sleep(_RETRY_S)
                continue
            if self._has_room():
                handshake = asyncio.create_task(self._connect(peer, context))
                self._handshakes.add(handshake)
                handshake.add_done_callback(self._handshakes.discard)
            else:
                # A client that has received settings would connect again at once.
                peer.close()

    def _has_room(self) -> bool:
        num_connections = self._num_open() + len(self._handshakes)
        has_room = num_connections < self._max_connections
        if not has_room and not self._is_full:
            log.warning("connections are refused", limit=self._max_connections)
            self._is_full = True
        # Not as soon as there is room for one, so that it is not reported all the time.
        elif num_connections <= self._max_connections // 2:
            self._is_full = False
        return has_room

    async def _connect(self, peer: socket, context: ssl.SSLContext | None) -> None:
        if peer.family != AF_UNIX:
            peer.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        # A handshake that fails is of no interest: port scanners cause them.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                peer,
                ssl=context,
                ssl_handshake_timeout=None if context is None else _HANDSHAKE_TIMEOUT_S,
            )
