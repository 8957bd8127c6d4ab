"""A client of the HTTP API that reads server-sent events and resumes them as `EventSource` does."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from itertools import cycle
from typing import Any

import httpx2

from benchmarks.chaos.mix import Request
from quire.client.outputs import CompletionDelta, RequestDelta, Usage

# As the Python client's.
RESUME_TIMEOUT_S = 30.0
_READ_TIMEOUT_S = 60.0
_RECONNECT_S = 0.3
_DONE = "[DONE]"
# Statuses of a gateway that stops, or has not found a scheduler yet.
_RETRIED = (429, 503)


class EventStreamError(Exception):
    """The server refused the request or ended it with an error, or it could not be resumed."""


class EventStream:
    """One request at one of several gateways: sent once, then continued after the last event."""

    def __init__(self, addresses: Sequence[str], request_id: str, request: Request) -> None:
        """The addresses are those of HTTP, in the order in which they are tried."""
        self._urls = cycle([f"http://{address}/v1" for address in addresses])
        self._request_id = request_id
        self._body = _body(request)
        self._last_id: str | None = None
        self._num_tokens: dict[int, int] = {}
        self._last_token_id: dict[int, int] = {}

    async def messages(self) -> AsyncGenerator[RequestDelta, None]:
        """Yield what the events have, as messages of the Python client. EventStreamError."""
        failing_since_s: float | None = None
        # Without TLS. Loading certificates takes 40 ms, in which no pause of a stream can end.
        async with httpx2.AsyncClient(
            timeout=_READ_TIMEOUT_S, trust_env=False, verify=False
        ) as client:
            while True:
                try:
                    async for data in self._events(client):
                        failing_since_s = None
                        if data == _DONE:
                            return
                        yield self._message(json.loads(data))
                    why = "the stream ended early"
                except httpx2.TransportError as error:
                    why = f"{type(error).__name__}: {error}"
                failing_since_s = failing_since_s or time.monotonic()
                if time.monotonic() - failing_since_s > RESUME_TIMEOUT_S:
                    raise EventStreamError(why)
                # A browser waits, too.
                await asyncio.sleep(_RECONNECT_S)

    async def _events(self, client: httpx2.AsyncClient) -> AsyncIterator[str]:
        """Connect to the next gateway; yield the data of the events."""
        url = next(self._urls)
        async with AsyncExitStack() as stack:
            if self._last_id is None:
                headers = {"accept": "text/event-stream", "x-request-id": self._request_id}
                opening = client.stream(
                    "POST", f"{url}/completions", json=self._body, headers=headers
                )
            else:
                events = f"{url}/requests/{self._request_id}/events"
                headers = {"last-event-id": self._last_id}
                opening = client.stream("GET", events, headers=headers)
            response = await stack.enter_async_context(opening)
            if response.status_code in _RETRIED:
                return
            if response.status_code != 200:
                body = (await response.aread()).decode(errors="replace")
                raise EventStreamError(f"status {response.status_code}: {body}")
            event_id, data = None, ""
            async for line in response.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data":
                    data = value
                elif not line and data:
                    # The id counts from the end of its event on.
                    self._last_id = event_id or self._last_id
                    yield data
                    data = ""

    def _message(self, chunk: dict[str, Any]) -> RequestDelta:
        if "error" in chunk:
            raise EventStreamError(str(chunk["error"]))
        usage = chunk.get("usage")
        return RequestDelta(
            request_id=self._request_id,
            model=chunk["model"],
            outputs=[self._delta(choice) for choice in chunk["choices"]],
            usage=None if usage is None else _usage(usage),
        )

    def _delta(self, choice: dict[str, Any]) -> CompletionDelta:
        """Positions are counted: an event has no position of its own."""
        index, token_ids = choice["index"], choice["token_ids"]
        first = self._num_tokens.get(index, 0)
        self._num_tokens[index] = first + len(token_ids)
        if token_ids:
            self._last_token_id[index] = token_ids[-1]
        stop_reason = choice["stop_reason"]
        if choice["finish_reason"] == "stop" and stop_reason is None:
            # An end-of-sequence token, which gRPC reports.
            stop_reason = self._last_token_id.get(index)
        return CompletionDelta(
            index=index,
            text=choice["text"],
            first_token_index=first,
            token_ids=token_ids,
            finish_reason=choice["finish_reason"],
            stop_reason=stop_reason,
        )


def _body(request: Request) -> dict[str, Any]:
    """The request for `/v1/completions`. Fields that are None are the server's defaults there and
    in gRPC."""
    params = _set_fields(asdict(request.params))
    if output := params.pop("structured_output", None):
        params["structured_outputs"] = _set_fields(output)
    # gRPC's default is the rest of the context, OpenAI's 16 tokens: all requests have their own.
    return {
        **params,
        "prompt": request.prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def _set_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _usage(usage: dict[str, Any]) -> Usage:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])
