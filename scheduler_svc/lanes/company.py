"""How long an idle lane waits for others before it begins with requests that are patient.

Who comes first would be computed alone, and its next token, too, as the second plan is sent before
the first one ends: two steps that read all weights for next to nothing, while the processors are
wanted by the very requests that are on their way. Where nobody waits for a first token, that is put
off while they come one upon the other.
"""

import time
from collections.abc import Callable
from typing import Final

# From one to the next, and from the first one on.
_GAP_S: Final = 0.002
_MOST_S: Final = 0.02


class Company:
    """One lane's."""

    def __init__(self, is_awaited: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_awaited = is_awaited
        self._clock = clock
        self._first_at = self._last_at = clock()

    def somebody_came(self, *, is_first: bool) -> None:
        """A sequence, to be admitted; maybe the first one of an idle lane."""
        self._last_at = self._clock()
        if is_first:
            self._first_at = self._last_at

    def left_s(self) -> float:
        """Seconds in which somebody may still come; 0 or less: none."""
        if not self._is_awaited:
            return 0.0
        return min(self._last_at + _GAP_S, self._first_at + _MOST_S) - self._clock()
