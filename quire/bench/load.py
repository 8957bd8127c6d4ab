"""Sends requests when they are due and notes what comes back."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext

from quire.bench.server import RequestFailed, Server
from quire.bench.trace import Trace
from quire.bench.workload import BenchRequest

# Hears of every message and every end.
Listener = Callable[[Trace], object]


async def run_load(
    server: Server,
    requests: Sequence[BenchRequest],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_change: Listener = lambda _: None,
) -> list[Trace]:
    """One trace per request, in their order. `times_s` says when each is due, in seconds from now.

    With `max_concurrency` no more than so many are under way: the load is no open one any more,
    and a request is due when it has got its place.
    """
    load = _Load(server, max_concurrency, on_change)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(load.send(request, due_s))
            for request, due_s in zip(requests, times_s, strict=True)
        ]
    return [task.result() for task in tasks]


class _Load:
    """What the requests of one load share."""

    def __init__(self, server: Server, max_concurrency: int | None, on_change: Listener) -> None:
        self._server = server
        self._is_closed = max_concurrency is not None
        self._places: AbstractAsyncContextManager[None] = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._on_change = on_change
        self._began_s = time.monotonic()

    async def send(self, request: BenchRequest, due_s: float) -> Trace:
        trace = Trace(num_prompt_tokens=len(request.prompt_token_ids), due_s=due_s)
        await asyncio.sleep(due_s - self._now_s())
        async with self._places:
            trace.sent_s = self._now_s()
            if self._is_closed:
                trace.due_s = trace.sent_s
            try:
                await self._follow(request, trace)
            except RequestFailed as error:
                trace.error = str(error)
            trace.ended_s = self._now_s()
        self._on_change(trace)
        return trace

    async def _follow(self, request: BenchRequest, trace: Trace) -> None:
        async with aclosing(self._server.stream(request)) as messages:
            async for message in messages:
                if message.num_counted_tokens is not None:
                    trace.num_counted_tokens = message.num_counted_tokens
                if message.count:
                    trace.times_s.append(self._now_s())
                    trace.counts.append(message.count)
                    trace.token_ids += message.token_ids
                    self._on_change(trace)

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s
