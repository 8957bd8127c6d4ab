"""Concurrent unary calls, each with its own retries, without a thread per call."""

import heapq
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

import grpc

from quire.client.errors import QuireError, translate_errors
from quire.client.retry_policy import RetryPolicy
from quire.client.targets import Metadata

# Calls in progress at once: enough to fill a service, few enough for its limits.
_MAX_CALLS = 2048
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
# The classes cannot be subscripted at run time.
# Returns the stub's method for a target.
StubMethodFor: TypeAlias = "Callable[[str], grpc.UnaryUnaryMultiCallable[_Request, _Response]]"


class ConcurrentCalls(Generic[_Request, _Response]):
    """Unary calls of one method, each with its retry policy."""

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
        # Indices of ended calls; times and indices of retries.
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._due: list[tuple[float, int]] = []

    def run(self) -> list[_Response]:
        """Return the responses in the order of the requests. The first final error is raised and
        cancels all other calls."""
        responses: dict[int, _Response] = {}
        try:
            unstarted = iter(range(len(self._requests)))
            for index in islice(unstarted, _MAX_CALLS):
                self._start(index)
            while len(responses) < len(self._requests):
                with suppress(queue.Empty):
                    index = self._ended.get(timeout=self._next_due_s())
                    self._finish(index, responses)
                    if index in responses:
                        for following in islice(unstarted, 1):
                            self._start(following)
                while self._due and self._due[0][0] <= time.monotonic():
                    self._start(heapq.heappop(self._due)[1])
        finally:
            for call in self._calls.values():
                call.cancel()
        return [responses[index] for index in range(len(self._requests))]

    def _start(self, index: int) -> None:
        retry_policy = self._retry_policies[index]
        timeout = retry_policy.begin_attempt()
        method = self._method_for(retry_policy.target)
        call = method.future(self._requests[index], timeout=timeout, metadata=self._metadata)
        self._calls[index] = call
        call.add_done_callback(lambda _: self._ended.put(index))

    def _finish(self, index: int, responses: dict[int, _Response]) -> None:
        """Store the response of an ended call, or schedule its retry."""
        retry_policy = self._retry_policies[index]
        try:
            with translate_errors(retry_policy.target):
                responses[index] = self._calls[index].result()
        except QuireError as error:
            heapq.heappush(self._due, (time.monotonic() + retry_policy.backoff_s(error), index))
        else:
            retry_policy.record_progress()

    def _next_due_s(self) -> float | None:
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
