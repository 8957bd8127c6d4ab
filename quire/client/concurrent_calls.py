"""Concurrent unary calls, each with its own retries, without a thread per call."""

import heapq
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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


class ConcurrentCalls(Generic[_Request, _Response]):
    """Unary calls of one method, each with its retry policy.

    If calls fail and are retried, there are half as many at once from then on: this process, or the
    server, may be too slow for so many, so that it does not respond to the pings of the connection.
    """

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
        self._calls: dict[int, grpc.Future[_Response]] = {}
        self._max_calls = MAX_CALLS
        self._num_running = 0
        # How often the limit was halved, and how often before each call's last attempt: calls that
        # fail together halve it once.
        self._num_halvings = 0
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
                at_most = min(num_ended + self._max_calls, len(self._requests))
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
        return self._num_running < self._max_calls

    def _start(self, index: int) -> None:
        self._num_running += 1
        self._halvings_before[index] = self._num_halvings
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
            return self._late[index]
        retry_policy = self._retry_policies[index]
        try:
            with translate_errors(retry_policy.target):
                response = self._calls[index].result()
        except QuireError as error:
            return self._retry(index, error)
        retry_policy.record_progress()
        return response

    def _retry(self, index: int, error: QuireError) -> QuireError | None:
        """Schedule a retry, or return the error if it is final."""
        try:
            delay_s = self._retry_policies[index].backoff_s(error)
        except QuireError as final:
            return final
        if self._halvings_before[index] == self._num_halvings:
            self._num_halvings += 1
            self._max_calls = max(self._max_calls // 2, min(_MIN_CALLS, MAX_CALLS))
        heapq.heappush(self._due, (time.monotonic() + delay_s, index))
        return None

    def _next_due_s(self) -> float | None:
        if not self._due or not self._has_room:
            return None
        return max(0.0, self._due[0][0] - time.monotonic())
