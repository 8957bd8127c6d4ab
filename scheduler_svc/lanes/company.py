"""How long an idle lane waits for others before it begins with requests that are patient.

Who comes first would be computed alone, and its next token, too, as the second plan is sent before
the first one ends: two steps that read all weights for next to nothing, while the processors are
wanted by the very requests that are on their way. Where nobody waits for a first token, that is put
off while they come one upon the other: a gateway takes some milliseconds from one handful to the
next. The second plan is put off in the same way, until the first one is back. Whoever comes alone
pays one token's time, or 2 ms where that is less.
"""

import time
from collections.abc import Callable
from typing import Final

# From one to the next as long as a token takes, within these.
_LEAST_GAP_S: Final = 0.002
_MOST_GAP_S: Final = 0.01
# From the first one to the first plan.
_MOST_S: Final = 0.02


class Company:
    """One lane's."""

    def __init__(
        self,
        is_awaited: bool,
        quiet_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`quiet_s` is how long nobody has come to whatever lane."""
        self._is_awaited = is_awaited
        self._quiet_s = quiet_s
        self._clock = clock
        self._first_at = 0.0
        self._is_beginning = False
        # The one that runs the first rows; None until it is sent.
        self._first_step: int | None = None
        # What a token of everybody took last.
        self._token_s = 0.0

    def first_came(self) -> None:
        """The first one for a lane that has nobody; plans of others may still be in flight."""
        self._first_at = self._clock()
        self._is_beginning = True
        self._first_step = None

    def sent(self, step: int) -> None:
        """A plan that runs rows."""
        if self._first_step is None:
            self._first_step = step

    def landed(self, step: int) -> None:
        """Any plan."""
        if self._first_step is not None and step >= self._first_step:
            self._is_beginning = False

    def decoded(self, token_s: float) -> None:
        """A plan that only decoded has come back: a token of everybody takes so long."""
        self._token_s = token_s

    def left_s(self) -> float:
        """Seconds in which somebody may still come; 0 or less: none."""
        if not (self._is_awaited and self._is_beginning):
            return 0.0
        gap_s = max(_LEAST_GAP_S, min(self._token_s, _MOST_GAP_S))
        left_s = gap_s - self._quiet_s()
        if self._first_step is not None:
            return left_s
        return min(left_s, self._first_at + _MOST_S - self._clock())
