"""Delays the first steps of an idle lane so that requests with deferred delivery are batched.

Without it the first request would be computed alone, and so would its next token, since the second
plan is sent before the first step ends: two steps that read all weights for one sequence, on
processors that the following requests need, too. While only such requests wait, the first plan is
delayed as long as requests keep coming; a gateway takes some milliseconds between two batches.
The second plan is delayed likewise, until the first step is complete. A request that arrives alone
is delayed by one token's time, within 2 and 10 ms.
"""

import time
from collections.abc import Callable
from typing import Final

# The gap between arrivals that closes the window: the time of a token, within these bounds.
_MIN_GAP_S: Final = 0.002
_MAX_GAP_S: Final = 0.01
# From the first arrival to the first plan.
_MAX_WINDOW_S: Final = 0.02


class BatchWindow:
    """The batch window of one lane."""

    def __init__(
        self,
        is_enabled: bool,
        since_last_arrival_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`since_last_arrival_s` returns the seconds since the last arrival at any lane."""
        self._is_enabled = is_enabled
        self._since_last_arrival_s = since_last_arrival_s
        self._clock = clock
        self._opened_at = 0.0
        self._is_open = False
        # The first step that runs rows; None until its plan is sent.
        self._first_step: int | None = None
        # Duration of the last pure decode round.
        self._token_s = 0.0

    def open(self) -> None:
        """Open the window at the first request of an empty lane. Earlier steps may be in flight."""
        self._opened_at = self._clock()
        self._is_open = True
        self._first_step = None

    def sent(self, step: int) -> None:
        """Record a plan that runs rows."""
        if self._first_step is None:
            self._first_step = step

    def completed(self, step: int) -> None:
        """Record the completion of any plan."""
        if self._first_step is not None and step >= self._first_step:
            self._is_open = False

    def decoded(self, token_s: float) -> None:
        """Record the duration of a decode round: the time of one token of each sequence."""
        self._token_s = token_s

    def remaining_s(self) -> float:
        """Seconds to wait for more requests; 0 or less: none."""
        if not (self._is_enabled and self._is_open):
            return 0.0
        gap_s = max(_MIN_GAP_S, min(self._token_s, _MAX_GAP_S))
        remaining_s = gap_s - self._since_last_arrival_s()
        if self._first_step is not None:
            return remaining_s
        return min(remaining_s, self._opened_at + _MAX_WINDOW_S - self._clock())
