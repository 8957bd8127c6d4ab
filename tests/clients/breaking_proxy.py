"""A TCP proxy whose connections break."""

import asyncio
import contextlib
import threading
from typing import Self


class BreakingProxy:
    """Forwards connections to a server, and resets each after `num_bytes` of its responses. Runs in
    a thread within the context."""

    def __init__(self, server: str, num_bytes: int) -> None:
        self.num_broken = 0
        self._host, _, self._port = server.rpartition(":")
        self._num_bytes = num_bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def address(self) -> str:
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(10)
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, response: asyncio.StreamWriter) -> None:
        server, request = await asyncio.open_connection(self._host, int(self._port))
        sending = asyncio.create_task(_forward(client, request))
        room = self._num_bytes
        try:
            with contextlib.suppress(ConnectionError):
                while data := await server.read(room):
                    response.write(data)
                    await response.drain()
                    room -= len(data)
                    if not room:
                        self.num_broken += 1
                        break
        finally:
            sending.cancel()
            request.transport.abort()
            response.transport.abort()


async def _forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(2**16):
            sink.write(data)
            await sink.drain()
