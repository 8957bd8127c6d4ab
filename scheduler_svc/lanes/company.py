"""How long an idle lane waits for others before it begins with requests that are patient.

Who comes first would be computed alone, and its next token, too, as the second plan is sent before
the first one ends: two steps that read all weights for next to nothing, while the processors are
wanted by the very requests that are on their way. Where nobody waits for a first token, that is put
off while they come one upon the other: a gateway takes some milliseconds from one handful to the
next. Whoever comes alone has its end later by about one token's time. The second plan is put off
in the same way, which costs nothing as long as the first one is computed.
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

    def first_came(self) -> None:
        """The first one for an idle lane."""
        self._first_at = self._clock()
        self._is_beginning = True

    def first_landed(self) -> None:
        """The first plan has come back."""
        self._is_beginning = False

    def left_s(self, round_s: float, *, is_computing: bool) -> float:
        """Seconds in which somebody may still come; 0 or less: none. `round_s` is what a token of
        everybody took last; `is_computing` if the first plan is on its way."""
        if not (self._is_awaited and self._is_beginning):
            return 0.0
        gap_s = max(_LEAST_GAP_S, min(round_s, _MOST_GAP_S))
        left_s = gap_s - self._quiet_s()
        return left_s if is_computing else min(left_s, self._first_at + _MOST_S - self._clock())
