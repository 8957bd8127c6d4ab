"""Sends requests at their arrival times and records the responses."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext

from quire.bench.request_timings import RequestTimings
from quire.bench.server import RequestFailed, Server
from quire.bench.workload import BenchRequest

# Called for each message with tokens and for each end of a request.
Listener = Callable[[RequestTimings], object]


async def run_load(
    server: Server,
    requests: Sequence[BenchRequest],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_change: Listener = lambda _: None,
) -> list[RequestTimings]:
    """Return the requests' timings, in order. `times_s` are arrival times in seconds from now.

    `max_concurrency` limits the requests in flight, which makes the load closed-loop: a request
    then arrives when it is sent.
    """
    load_run = _LoadRun(server, max_concurrency, on_change)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(load_run.send(request, due_s))
            for request, due_s in zip(requests, times_s, strict=True)
        ]
    return [task.result() for task in tasks]


class _LoadRun:
    """The server, the concurrency limit and the clock of one load."""

    def __init__(self, server: Server, max_concurrency: int | None, on_change: Listener) -> None:
        self._server = server
        self._is_closed = max_concurrency is not None
        self._slots: AbstractAsyncContextManager[None] = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._on_change = on_change
        self._began_s = time.monotonic()

    async def send(self, request: BenchRequest, due_s: float) -> RequestTimings:
        timings = RequestTimings(num_prompt_tokens=len(request.prompt_token_ids), due_s=due_s)
        await asyncio.sleep(due_s - self._now_s())
        async with self._slots:
            timings.sent_s = self._now_s()
            if self._is_closed:
                timings.due_s = timings.sent_s
            try:
                await self._read_stream(request, timings)
            except RequestFailed as error:
                timings.error = str(error)
            timings.ended_s = self._now_s()
        self._on_change(timings)
        return timings

    async def _read_stream(self, request: BenchRequest, timings: RequestTimings) -> None:
        async with aclosing(self._server.stream(request)) as messages:
            async for message in messages:
                if message.num_counted_tokens is not None:
                    timings.num_counted_tokens = message.num_counted_tokens
                if message.count:
                    timings.times_s.append(self._now_s())
                    timings.counts.append(message.count)
                    timings.token_ids += message.token_ids
                    self._on_change(timings)

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s
