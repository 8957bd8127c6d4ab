"""Calls that are made at once and each repeated by itself, without a thread for each."""

import heapq
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

import grpc

from quire.errors import QuireError, clear_errors
from quire.patience import Patience

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
# The classes cannot be subscripted when they run.
_Call: TypeAlias = "grpc.Future[_Response]"
# The method to call at a target.
MethodAt: TypeAlias = "Callable[[str], grpc.UnaryUnaryMultiCallable[_Request, _Response]]"


class Batch(Generic[_Request, _Response]):
    """Unary calls, each with its patience. `run` gives the responses in the order of the
    requests."""

    def __init__(
        self,
        method_at: "MethodAt[_Request, _Response]",
        requests: Sequence[_Request],
        patiences: Sequence[Patience],
    ) -> None:
        self._method_at = method_at
        self._requests = requests
        self._patiences = patiences
        self._calls: dict[int, _Call[_Response]] = {}
        # Indices of calls that have ended, and times and indices of those that wait.
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._due: list[tuple[float, int]] = []

    def run(self) -> list[_Response]:
        """The first to fail for good raises its QuireError and cancels the others."""
        responses: dict[int, _Response] = {}
        try:
            for index in range(len(self._requests)):
                self._start(index)
            while len(responses) < len(self._requests):
                with suppress(queue.Empty):
                    index = self._ended.get(timeout=self._next_due_s())
                    self._take(index, responses)
                self._start_due()
        finally:
            for call in self._calls.values():
                call.cancel()
        return [responses[index] for index in range(len(self._requests))]

    def _start(self, index: int) -> None:
        patience = self._patiences[index]
        timeout = patience.begin()
        method = self._method_at(patience.target)
        call = method.future(self._requests[index], timeout=timeout)
        self._calls[index] = call
        call.add_done_callback(lambda _: self._ended.put(index))

    def _take(self, index: int, responses: dict[int, _Response]) -> None:
        patience = self._patiences[index]
        try:
            with clear_errors(patience.target):
                responses[index] = self._calls[index].result()
        except QuireError as error:
            heapq.heappush(self._due, (time.monotonic() + patience.failed(error), index))
        else:
            patience.progress()

    def _next_due_s(self) -> float | None:
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def _start_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            self._start(heapq.heappop(self._due)[1])
