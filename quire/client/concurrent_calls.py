"""Concurrent unary calls, each with its own retries, without a thread per call."""

import asyncio
import heapq
import queue
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeAlias, TypeVar

import grpc

from quire.client.errors import QuireError, translate_errors
from quire.client.retry_policy import RetryPolicy
from quire.client.targets import Metadata

# Calls in progress at once: enough to fill a service, few enough for its limits.
MAX_CALLS = 2048
# As few as they become by failures.
_MIN_CALLS = 128
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
# The classes cannot be subscripted at run time.
# Returns the stub's method for a target.
StubMethodFor: TypeAlias = "Callable[[str], grpc.UnaryUnaryMultiCallable[_Request, _Response]]"


class CallLimit:
    """How many calls may run at once: half as many whenever calls fail and are retried, one more
    with each success since. This process, or the server, may be too slow for so many, so that it
    does not respond to the pings of the connection."""

    def __init__(self) -> None:
        self.max_calls = MAX_CALLS
        self.num_halvings = 0

    def halve(self, halvings_before: int) -> int:
        """Take a failed call, with the number of halvings at its begin: calls that fail together
        halve the limit once. Returns by how much it fell."""
        if halvings_before != self.num_halvings:
            return 0
        before = self.max_calls
        self.num_halvings += 1
        self.max_calls = max(before // 2, min(_MIN_CALLS, MAX_CALLS))
        return before - self.max_calls

    def grow(self, halvings_before: int) -> bool:
        """Take a successful call, with the number of halvings at its begin: one that ran among too
        many others does not count. Returns whether the limit rose."""
        rises = halvings_before == self.num_halvings and self.max_calls < MAX_CALLS
        self.max_calls += rises
        return rises


class AioCallLimit:
    """A `CallLimit` that attempts of calls wait for, in their order."""

    def __init__(self) -> None:
        self._limit = CallLimit()
        self._free = asyncio.Semaphore(MAX_CALLS)
        # Of calls that began before the limit fell.
        self._excess = 0

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[int]:
        """Wait for room. Yields what `halve` needs if the call fails, and `grow` otherwise."""
        await self._free.acquire()
        try:
            yield self._limit.num_halvings
        finally:
            if self._excess:
                self._excess -= 1
            else:
                self._free.release()

    def halve(self, halvings_before: int) -> None:
        self._excess += self._limit.halve(halvings_before)

    def grow(self, halvings_before: int) -> None:
        if not self._limit.grow(halvings_before):
            return
        if self._excess:
            self._excess -= 1
        else:
            self._free.release()


async def run_each_aio(
    call: "Callable[[_Request, AioCallLimit], Awaitable[_Response]]",
    requests: Sequence[_Request],
    on_end: Callable[[int, _Response | QuireError], object],
) -> None:
    """`ConcurrentCalls.run_each` for asyncio. `call` retries by itself, within the limit."""
    # Those that wait for a retry count, too: others would only wait with them.
    begun = asyncio.Semaphore(MAX_CALLS)
    limit = AioCallLimit()

    async def run(index: int, request: _Request) -> None:
        result: _Response | QuireError
        async with begun:
            try:
                result = await call(request, limit)
            except QuireError as error:
                result = error
        on_end(index, result)

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(run(index, request))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


class ConcurrentCalls(Generic[_Request, _Response]):
    """Unary calls of one method, each with its retry policy; at once as many as a `CallLimit`
    allows."""

    def __init__(
        self,
        method_for: "StubMethodFor[_Request, _Response]",
        requests: Sequence[_Request],
        retry_policies: Sequence[RetryPolicy],
        metadata: Metadata,
    ) -> None:
        self._method_for = method_for
        self._requests = requests
        self._retry_policies = retry_policies
        self._metadata = metadata
        # Those whose results have not been taken.
        self._calls: dict[int, grpc.Future[_Response]] = {}
        self._limit = CallLimit()
        self._num_running = 0
        # How often the limit was halved before each call's last attempt.
        self._halvings_before: dict[int, int] = {}
        # Indices of ended calls; times and indices of retries.
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._due: list[tuple[float, int]] = []
        # Errors of calls whose deadline passed before their retry.
        self._late: dict[int, QuireError] = {}

    def run(self) -> list[_Response]:
        """Return the responses in the order of the requests. The first final error is raised and
        cancels all other calls."""
        responses: dict[int, _Response] = {}

        def take(index: int, result: _Response | QuireError) -> None:
            if isinstance(result, QuireError):
                raise result
            responses[index] = result

        self.run_each(take)
        return [responses[index] for index in range(len(self._requests))]

    def run_each(self, on_end: Callable[[int, _Response | QuireError], object]) -> None:
        """Call `on_end` with the index and the response or the final error of each call that ends.
        An exception of `on_end` cancels all other calls."""
        num_begun = num_ended = 0
        try:
            while num_ended < len(self._requests):
                while self._has_room and self._due and self._due[0][0] <= time.monotonic():
                    self._start(heapq.heappop(self._due)[1])
                # Those that wait for a retry count, too: others would only wait with them.
                at_most = min(num_ended + self._limit.max_calls, len(self._requests))
                while self._has_room and num_begun < at_most:
                    self._start(num_begun)
                    num_begun += 1
                with suppress(queue.Empty):
                    index = self._ended.get(timeout=self._next_due_s())
                    self._num_running -= 1
                    if (result := self._result(index)) is not None:
                        num_ended += 1
                        on_end(index, result)
        finally:
            for call in self._calls.values():
                call.cancel()

    @property
    def _has_room(self) -> bool:
        return self._num_running < self._limit.max_calls

    def _start(self, index: int) -> None:
        self._num_running += 1
        self._halvings_before[index] = self._limit.num_halvings
        retry_policy = self._retry_policies[index]
        try:
            timeout = retry_policy.begin_attempt()
        except QuireError as error:
            self._late[index] = error
            self._ended.put(index)
            return
        method = self._method_for(retry_policy.target)
        call = method.future(self._requests[index], timeout=timeout, metadata=self._metadata)
        self._calls[index] = call
        call.add_done_callback(lambda _: self._ended.put(index))

    def _result(self, index: int) -> _Response | QuireError | None:
        """The response or the final error of an ended call; None if its retry is scheduled."""
        if index in self._late:
            return self._late.pop(index)
        retry_policy = self._retry_policies[index]
        try:
            with translate_errors(retry_policy.target):
                # An ended call keeps its response.
                response = self._calls.pop(index).result()
        except QuireError as error:
            return self._retry(index, error)
        retry_policy.record_progress()
        self._limit.grow(self._halvings_before[index])
        return response

    def _retry(self, index: int, error: QuireError) -> QuireError | None:
        """Schedule a retry, or return the error if it is final."""
        try:
            delay_s = self._retry_policies[index].backoff_s(error)
        except QuireError as final:
            return final
        self._limit.halve(self._halvings_before[index])
        heapq.heappush(self._due, (time.monotonic() + delay_s, index))
        return None

    def _next_due_s(self) -> float | None:
        if not self._due or not self._has_room:
            return None
        return max(0.0, self._due[0][0] - time.monotonic())
