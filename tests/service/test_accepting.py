"""The queue of connections that a server has not accepted yet."""

import asyncio
import socket
import struct
from pathlib import Path

from quire.service.http2.accepting import Acceptor

# Clients that connect at the same time, such as those of a load test.
BURST = 2000
# Of a listening socket, in Linux' struct tcp_info: the length of its queue.
QUEUE_AT = 28
LONGEST_QUEUE = int(Path("/proc/sys/net/core/somaxconn").read_text())


async def test_clients_that_connect_together_have_room_in_the_queue() -> None:
    """Those without it connect a second later, when the system tries again."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    acceptor = Acceptor(asyncio.Protocol, lambda: 0, max_connections=1)
    acceptor.listen(bound, None)
    info = bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, QUEUE_AT + 4)
    [length] = struct.unpack_from("I", info, QUEUE_AT)
    await acceptor.close()
    assert length >= min(BURST, LONGEST_QUEUE)
