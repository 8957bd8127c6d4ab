"""The response of a request that generates: written while it runs, ended with its client."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog
from fastapi import Request, Response

from gateway_svc.http.dialects import INTERNAL_ERROR, OPENAI, Dialect
from gateway_svc.http.errors import format_names, to_http
from gateway_svc.http.response_writer import KEEP_ALIVE_S, Receive, ResponseWriter, Send
from quire.service.errors import RequestError

log = structlog.get_logger()


class GenerationResponse(Response):
    """Runs a request and writes its output, as it is generated.

    It is no response with a ready body: its status is known only when the scheduler has accepted
    the request, and a client that disconnects ends the run.
    """

    def __init__(
        self,
        request_id: str,
        run: Callable[[ResponseWriter], Awaitable[None]],
        renamed: dict[str, str] | None = None,
        dialect: Dialect = OPENAI,
    ) -> None:
        """`run` generates and writes; it may raise a RequestError. `renamed` has the client's
        names of fields."""
        super().__init__()
        self._request_id = request_id
        self._run = run
        self._renamed = renamed
        self._dialect = dialect

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        has_ids = _wants_ids(Request(scope))
        writer = ResponseWriter(send, self._request_id, has_ids, self._dialect)

        async def watch() -> None:
            await _wait_until_disconnected(receive, writer)
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await self._write(writer)
        except asyncio.CancelledError:
            # The client has disconnected, or reads too slowly: the server closes the connection of
            # a response that is not complete.
            task.uncancel()
        finally:
            watcher.cancel()

    async def _write(self, writer: ResponseWriter) -> None:
        try:
            await self._run(writer)
        except RequestError as error:
            await writer.error(to_http(error, {**format_names(error), **(self._renamed or {})}))
        except Exception:
            log.exception("a request failed unexpectedly")
            await writer.error(INTERNAL_ERROR)


def _wants_ids(request: Request) -> bool:
    """Whether the client reads server-sent events as the standard has them. A client of OpenAI's
    API may take all of an event after `data:` for JSON."""
    return request.method == "GET" or "text/event-stream" in request.headers.get("accept", "")


async def _wait_until_disconnected(receive: Receive, writer: ResponseWriter) -> None:
    """Return when the client has disconnected; write comments while a stream is idle."""
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                message = await receive()
        except TimeoutError:
            await writer.keep_alive()
            continue
        if message["type"] == "http.disconnect":
            return
