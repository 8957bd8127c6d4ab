"""Notices that this process was suspended, as by SIGSTOP or with its machine."""

import asyncio
import math
import time
from collections.abc import Callable

_LOOK_S = 0.25
# A process that has not looked for so long was suspended. Clients wait longer than this for a
# server that does not respond: 1.5 s at least (`quire/client/targets.py`).
_SUSPENDED_S = 1.0
# In which it finds out which connections were closed meanwhile.
_CATCH_UP_S = 2.0


class Suspension:
    """The last suspension of this process. A client that disconnects meanwhile may have done so
    because nothing responded, and may be about to resume."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        # The end of the last suspension.
        self._resumed_at = -math.inf

    async def run(self) -> None:
        """Look until cancelled."""
        # The start of the process may have taken long.
        self._looked_at = self._clock()
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def has_just_ended(self) -> bool:
        """Whether a disconnection that is noticed now may be as old as the suspension."""
        self._look()
        return self._looked_at - self._resumed_at < _CATCH_UP_S

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at > _SUSPENDED_S:
            self._resumed_at = now
        self._looked_at = now
