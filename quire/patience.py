"""When a request that failed is sent again, where to, and when that has gone on for too long."""

import math
import random
import time
from collections.abc import Callable

import grpc

from quire.arguments import deadline
from quire.errors import QuireError
from quire.targets import Targets

# Twice what a service needs to be started again.
RESUME_TIMEOUT_S = 30.0
# What the attempt to end a request that nobody waits for may take.
CANCEL_TIMEOUT_S = 1.0
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0
# A try that has lasted so long had reached a server: the way there breaks much sooner.
_REACHED_S = 5.0
_TAKEN_OVER = "TAKEN_OVER"


def resume_timeout(seconds: float) -> float:
    """TypeError or ValueError for what is no time; infinity is one."""
    checked = deadline("resume_timeout_s", seconds)
    return math.inf if checked is None else checked


def is_final(error: QuireError) -> bool:
    """Another try would be in vain; or it would take a request from whoever has taken it over."""
    return error.reason == _TAKEN_OVER or not error.resumable


class Patience:
    """One request's tries, at one target after the other.

    It sends nothing itself: it is told when a try begins, gets further or fails, and says what is
    next. `timeout_s` is what all tries have together, None is for ever. `resume_timeout_s` is how
    long they may fail without getting further; 0 allows one try. `on_break` hears of each failure
    that is followed by another try.
    """

    def __init__(
        self,
        targets: Targets,
        resume_timeout_s: float,
        timeout_s: float | None = None,
        *,
        on_break: Callable[[QuireError], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.target = targets.current
        self._targets = targets
        self._on_break = on_break
        self._resume_timeout_s = resume_timeout_s
        self._clock = clock
        self._jitter = jitter
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._tried_s = 0.0
        self._broken_s: float | None = None
        self._delay_s = _FIRST_DELAY_S
        self._last_error: QuireError | None = None

    def begin(self) -> float | None:
        """Begins a try; gives its timeout in seconds. QuireError if the time is over."""
        self._tried_s = self._clock()
        if self._deadline_s is None:
            return None
        left_s = max(0.0, self._deadline_s - self._tried_s)
        if left_s == 0.0 and self._last_error is not None:
            message = f"no time is left to try again after {self._last_error}"
            raise QuireError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        return left_s

    def progress(self) -> None:
        """Something new has come: what fails from here on has all its time again."""
        self._targets.current = self.target
        self._broken_s = None

    def failed(self, error: QuireError, resumable: bool = False) -> float:
        """Seconds to wait until the next try, at the next target. Raises the error if it is
        final, unless the caller knows a way on."""
        if is_final(error) and not resumable:
            raise error
        now = self._clock()
        if self._broken_s is None or now - self._tried_s >= _REACHED_S:
            self._broken_s = now
            self._delay_s = _FIRST_DELAY_S
        if now - self._broken_s >= self._resume_timeout_s:
            raise error
        self._last_error = error
        if self._on_break is not None:
            self._on_break(error)
        self.target = self._targets.after(self.target)
        return self._next_delay(now)

    def _next_delay(self, now: float) -> float:
        """Half of it is left to chance, so that clients do not come all at once."""
        delay_s = self._delay_s * (0.5 + 0.5 * self._jitter())
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
        return delay_s if self._deadline_s is None else min(delay_s, max(0, self._deadline_s - now))
