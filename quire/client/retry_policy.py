"""Decides when and where a failed request is retried, and when to give up."""

import math
import random
import time
from collections.abc import Callable

import grpc

from quire.client.arguments import deadline
from quire.client.errors import CancelledError, DeadlineExceededError, QuireError
from quire.client.targets import Targets

# Twice the time in which a service restarts.
RESUME_TIMEOUT_S = 30.0
CANCEL_TIMEOUT_S = 1.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
# An attempt of this duration had reached a server, because failures to connect are shorter.
_REACHED_S = 5.0
# So many such attempts begin the time without progress anew: a request may wait long for a worker.
# More mean that a proxy breaks the connection before the response, each time again.
_MAX_RESTARTS = 5
_TAKEN_OVER = "TAKEN_OVER"
# The reason of a gateway whose wait for a scheduler has timed out: however long the attempt was, it
# has reached none.
_SCHEDULER_AWAY = "SCHEDULER_AWAY"
# What gRPC says of an attempt that it could not send.
_NOT_SENT = ("failed to connect to all addresses", "errors resolving")


def resume_timeout(seconds: float) -> float:
    """Check a timeout, which may be infinite. TypeError or ValueError for other values."""
    checked = deadline("resume_timeout_s", seconds)
    return math.inf if checked is None else checked


def is_final(error: QuireError) -> bool:
    """Whether a retry would fail too, or would take the request from its new client."""
    return error.reason == _TAKEN_OVER or not error.resumable


class RetryPolicy:
    """The retries of one request, at one target after another.

    Sends nothing itself; a client reports the start, progress and failure of each attempt.
    `timeout_s` limits all attempts together; None is no limit. `resume_timeout_s` limits the time
    without progress, which at most five attempts that had reached a server begin anew; 0 allows one
    attempt. `on_break` is called with each failure that is retried. A call that is in progress when
    its client is closed is not retried: it fails with CANCELLED.
    """

    def __init__(
        self,
        targets: Targets,
        resume_timeout_s: float,
        timeout_s: float | None = None,
        *,
        on_break: Callable[[QuireError], object] | None = None,
        is_closed: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.target = targets.current
        self._targets = targets
        self._on_break = on_break
        self._is_closed = is_closed
        self._resume_timeout_s = resume_timeout_s
        self._clock = clock
        self._jitter = jitter
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._attempted_s = 0.0
        # When the next attempt is due.
        self._due_s = 0.0
        self._failing_since_s: float | None = None
        # How often that time began anew without progress.
        self._num_restarts = 0
        self._backoff_s = _FIRST_BACKOFF_S
        self._last_error: QuireError | None = None
        self._was_sent = False

    def begin_attempt(self) -> float | None:
        """Begin an attempt; return its timeout. QuireError if the deadline has passed, or the
        client was closed since the last attempt."""
        if self._last_error is None:
            # Others may have found another gateway since this call was planned.
            self.target = self._targets.current
        else:
            self._check_open()
        self._attempted_s = self._clock()
        if self._failing_since_s is not None:
            # A retry that waits for room among other calls does not fail meanwhile.
            self._failing_since_s += max(0.0, self._attempted_s - self._due_s)
        if self._deadline_s is None:
            return None
        left_s = max(0.0, self._deadline_s - self._attempted_s)
        if left_s == 0.0 and self._last_error is not None:
            message = f"no time is left for a retry after {self._last_error}"
            raise DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        return left_s

    def record_progress(self) -> None:
        """Reset the time without progress."""
        self._targets.current = self.target
        self._failing_since_s = None
        self._num_restarts = 0

    def backoff_s(self, error: QuireError, resumable: bool = False) -> float:
        """Select the next target; return the delay of the retry. Raises the error if it is final,
        unless the caller can resume the request, at the same target."""
        error.repeated = self._was_sent
        if is_final(error) and not resumable:
            raise error
        self._check_open()
        now = self._clock()
        lasted = now - self._attempted_s >= _REACHED_S and error.reason != _SCHEDULER_AWAY
        restarts = lasted and self._num_restarts < _MAX_RESTARTS
        if self._failing_since_s is None or restarts:
            self._num_restarts += self._failing_since_s is not None
            self._failing_since_s = now
            self._backoff_s = _FIRST_BACKOFF_S
        if now - self._failing_since_s >= self._resume_timeout_s:
            raise error
        self._last_error = error
        self._was_sent = self._was_sent or not any(said in error.message for said in _NOT_SENT)
        if self._on_break is not None:
            self._on_break(error)
        if not is_final(error):
            self.target = self._targets.after(self.target)
        # An overloaded server's time; after other failures another server may be ready at once.
        overloaded = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        delay_s = self._next_delay(now, (error.retry_after_s or 0.0) if overloaded else 0.0)
        self._due_s = now + delay_s
        return delay_s

    def _check_open(self) -> None:
        if self._is_closed():
            raise CancelledError(grpc.StatusCode.CANCELLED, "the client is closed")

    def _next_delay(self, now: float, at_least_s: float) -> float:
        """Half of the delay is random, so that clients do not retry simultaneously."""
        delay_s = max(self._backoff_s, 2 * at_least_s) * (0.5 + 0.5 * self._jitter())
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
        return delay_s if self._deadline_s is None else min(delay_s, max(0, self._deadline_s - now))
