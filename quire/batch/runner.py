"""Sends the requests of a batch, a limited number at a time, with retries."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from uuid import uuid4

import httpx2

from quire.batch.lines import (
    BatchError,
    BatchOutput,
    BatchResponse,
    InvalidLine,
    encoded_body,
    parse_line,
)
from quire.client.targets import key_metadata
from quire.service.addresses import is_http_url, is_loopback
from quire.service.tls import TLS

# Statuses after which the same request can succeed: a limit is reached, or nothing serves it now.
_TRANSIENT: Final = frozenset({429, 502, 503})
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
# An attempt of this duration had reached a server, because failures to connect are shorter.
_REACHED_S = 5.0
# So many such attempts of a request begin its time anew: it may wait long for a worker. More mean
# that a proxy breaks the connection before the response, each time again.
_MAX_RESTARTS: Final = 5
# Of a response that is not JSON, in its error.
_SHOWN_BYTES: Final = 200
_DUPLICATE: Final = "custom_id: another line has it"


class BatchRunner:
    """Runs batches at one server.

    `url` is the API's base and ends with `/v1`. A request is sent again, under the same request id,
    so that Quire attaches it to the first one, until for `retry_timeout_s` no request of the batch
    has had a response. Meanwhile, five attempts that had reached a server begin its time anew.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        tls: TLS | None,
        max_concurrency: int,
        retry_timeout_s: float,
    ) -> None:
        self._client = _client(url, api_key, tls, max_concurrency)
        name = None if tls is None else tls.server_name
        self._extensions = {} if name is None else {"sni_hostname": name}
        self._max_concurrency = max_concurrency
        self._retry_timeout_s = retry_timeout_s
        # Time of the last response that was not transient, by the monotonic clock.
        self._progress_s = time.monotonic()

    async def run(
        self,
        lines: Sequence[str],
        write: Callable[[BatchOutput], object],
        done: Iterable[str] = (),
    ) -> None:
        """Call `write` with the output of each line that is not blank, as soon as there is one.
        `done` are custom_ids of lines that have been left out."""
        self._progress_s = time.monotonic()
        seen = Counter(done)
        waiting = iter(lines)

        async def work() -> None:
            for line in waiting:
                if line.strip():
                    write(await self._output(line, seen))

        try:
            async with self._client, asyncio.TaskGroup() as tasks:
                for _ in range(min(self._max_concurrency, len(lines))):
                    tasks.create_task(work())
        except ExceptionGroup as failures:
            # Of `write`: the output is closed or full.
            raise failures.exceptions[0] from None

    async def _output(self, line: str, seen: Counter[str]) -> BatchOutput:
        request_id = f"batch_req_{uuid4().hex}"
        try:
            request = parse_line(line)
            body = encoded_body(request)
            seen[request.custom_id] += 1
            if seen[request.custom_id] > 1:
                raise InvalidLine(_DUPLICATE, request.custom_id)
        except InvalidLine as error:
            cause = BatchError("invalid_line", str(error))
            return BatchOutput(request_id, error.custom_id, error=cause)
        try:
            response = await self._respond(request.url, body, request_id)
        except httpx2.HTTPError as error:
            cause = BatchError("no_response", f"{type(error).__name__}: {error}")
            return BatchOutput(request_id, request.custom_id, error=cause)
        except ValueError as error:
            cause = BatchError("no_response", str(error))
            return BatchOutput(request_id, request.custom_id, error=cause)
        return BatchOutput(request_id, request.custom_id, response=response)

    async def _respond(self, url: str, body: bytes, request_id: str) -> BatchResponse:
        """HTTPError without a response, ValueError with its beginning if it is not JSON."""
        failing_since_s: float | None = None
        backoff_s, num_restarts = _FIRST_BACKOFF_S, 0
        while True:
            began_s = time.monotonic()
            outcome = await self._attempt(url, body, request_id)
            response = outcome if isinstance(outcome, httpx2.Response) else None
            if response is not None and response.status_code not in _TRANSIENT:
                self._progress_s = time.monotonic()
                return _parsed(response)
            now = time.monotonic()
            if failing_since_s is None:
                failing_since_s = now
            elif self._progress_s > failing_since_s:
                failing_since_s, num_restarts = self._progress_s, 0
            lasted = _had_connected(outcome) and now - began_s >= _REACHED_S
            if lasted and num_restarts < _MAX_RESTARTS:
                failing_since_s, backoff_s = now, _FIRST_BACKOFF_S
                num_restarts += 1
            if now - failing_since_s >= self._retry_timeout_s:
                if isinstance(outcome, httpx2.TransportError):
                    raise outcome
                return _parsed(outcome)
            least_s = _retry_after_s(response)
            # Half of the delay is random, so that requests are not sent again simultaneously.
            await asyncio.sleep(max(backoff_s, 2 * least_s) * (0.5 + 0.5 * random.random()))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _attempt(
        self, url: str, body: bytes, request_id: str
    ) -> httpx2.Response | httpx2.TransportError:
        try:
            return await self._client.post(
                url.removeprefix("/v1/"),
                content=body,
                headers={"Content-Type": "application/json", "X-Request-Id": request_id},
                extensions=self._extensions,
            )
        except httpx2.TransportError as error:
            return error


def _had_connected(outcome: httpx2.Response | httpx2.TransportError) -> bool:
    """Whether an attempt failed with a connection that had been made."""
    others = httpx2.Response | httpx2.ConnectError | httpx2.ConnectTimeout
    return not isinstance(outcome, others)


def _parsed(response: httpx2.Response) -> BatchResponse:
    """ValueError with the response's beginning if it is not JSON."""
    try:
        body = response.json()
    except ValueError as error:
        begins = response.content[:_SHOWN_BYTES].decode(errors="replace").strip()
        raise ValueError(f"status {response.status_code}, and no JSON: {begins!r}") from error
    return BatchResponse(response.status_code, response.headers.get("X-Request-Id"), body)


def _retry_after_s(response: httpx2.Response | None) -> float:
    """The server's time to wait; 0 without one in seconds."""
    value = "" if response is None else response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def _client(
    url: str, api_key: str | None, tls: TLS | None, max_concurrency: int
) -> httpx2.AsyncClient:
    """ValueError for a URL that is not one of HTTP, or a key that is none. A response may take any
    time. A server on this machine is not reached through a proxy."""
    if not is_http_url(url):
        raise ValueError(f"--base-url: expected http://host:port/v1 (got {url!r})")
    parsed = httpx2.URL(url)
    return httpx2.AsyncClient(
        base_url=url,
        verify=True if tls is None else tls.ssl_context(),
        headers=dict(key_metadata(api_key)),
        timeout=httpx2.Timeout(None, connect=10.0),
        limits=httpx2.Limits(max_connections=max_concurrency),
        trust_env=not is_loopback(f"{parsed.host}:{parsed.port or 80}"),
    )
