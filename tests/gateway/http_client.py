"""A client of the gateway's HTTP API, and scripted output behind it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from gateway_stack import Stack

from quire.internal.v1 import scheduler_pb2


@dataclass
class Event:
    """A server-sent event."""

    data: str
    id: str | None = None
    name: str | None = None

    def json(self) -> Any:
        return json.loads(self.data)


@dataclass
class Http:
    """Sends requests to the gateway of a stack."""

    stack: Stack
    client: httpx2.AsyncClient
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def start(self, path: str, body: dict[str, Any], **headers: str) -> asyncio.Task[Any]:
        """Send a request whose output the test scripts."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return asyncio.create_task(self.client.post(path, json=body, headers=sent))

    async def respond(self, path: str, body: dict[str, Any], text: str, **headers: str) -> Any:
        """Send a request, give its output, and return the response's JSON."""
        sending = self.start(path, body, **headers)
        await self.stack.scheduler.serve_one(self.stack.encode(text))
        response = await sending
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Send a request that fails; return the status and the error."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await self.client.post(path, json=body, headers=sent)
        return response.status_code, response.json()["error"]

    @asynccontextmanager
    async def stream(
        self, path: str, body: dict[str, Any] | None = None, **headers: str
    ) -> AsyncIterator["Events"]:
        """Send a request and yield the events of its stream."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"accept": "text/event-stream", **sent}
        events = Events()
        reading = asyncio.create_task(events.read(self.client, path, body, sent))
        try:
            yield events
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def submission(self) -> scheduler_pb2.Submission:
        return await self.stack.scheduler.submissions.get()


class Events:
    """The events of a stream, read in a task: the response may start after the script."""

    def __init__(self) -> None:
        self._queue = asyncio.Queue[Event | None]()
        # After the first event.
        self.headers: dict[str, str] = {}

    async def read(
        self,
        client: httpx2.AsyncClient,
        path: str,
        body: dict[str, Any] | None,
        headers: dict[str, str],
    ) -> None:
        method = "GET" if body is None else "POST"
        try:
            async with client.stream(method, path, json=body, headers=headers) as response:
                self.headers = {**response.headers, "status": str(response.status_code)}
                await self._read_lines(response)
        finally:
            self._queue.put_nowait(None)

    async def _read_lines(self, response: httpx2.Response) -> None:
        event = Event("")
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if not line:
                if event.data:
                    self._queue.put_nowait(event)
                event = Event("")
            elif name == "data":
                event.data += value
            elif name == "id":
                event.id = value
            elif name == "event":
                event.name = value

    async def next(self) -> Event:
        event = await self._queue.get()
        assert event is not None, "the stream has ended"
        return event

    async def rest(self) -> list[Event]:
        """The events until the end of the stream."""
        events = []
        while (event := await self._queue.get()) is not None:
            events.append(event)
        return events
