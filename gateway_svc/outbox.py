"""What waits to be said to the scheduler: everything of one turn of the loop in one frame."""

import asyncio

from quire.internal.v1 import scheduler_pb2


class Outbox:
    """Gathers parts into a frame. `frame()` is the one to add to, `take()` the one to send."""

    def __init__(self) -> None:
        self._frame = scheduler_pb2.ConnectRequest()
        self._filled = asyncio.Event()

    def frame(self) -> scheduler_pb2.ConnectRequest:
        """To be added to at once: the next turn of the loop sends it."""
        self._filled.set()
        return self._frame

    async def take(self) -> scheduler_pb2.ConnectRequest:
        await self._filled.wait()
        frame, self._frame = self._frame, scheduler_pb2.ConnectRequest()
        self._filled.clear()
        return frame
