"""When requests come: lanes plan ahead while none do, and wait for more while some do."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Arrivals:
    """Those of all lanes together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_at = clock()
        self._num_coming = 0

    def queued(self) -> None:
        """A request waits for a lane, for the first time here."""
        self._last_at = self._clock()

    @contextmanager
    def coming(self, num_requests: int) -> Iterator[None]:
        """So many are being recorded, and are queued before this ends, unless they are refused."""
        self._num_coming += num_requests
        try:
            yield
        finally:
            self._num_coming -= num_requests

    def quiet_s(self) -> float:
        """Seconds since somebody came; 0 while somebody comes."""
        return 0.0 if self._num_coming else self._clock() - self._last_at
