"""The time for which no scheduler led or no worker had joined, to explain expired deadlines."""

import enum
import time
from collections.abc import Callable, Mapping


class Outage(enum.Enum):
    """What requests wait for; the value continues "waited 3.0 s for"."""

    SCHEDULER = "a scheduler to lead"
    WORKER = "a worker"


class Outages:
    """Sums the seconds of each kind of outage; one kind at most is in progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(Outage, 0.0)
        self._current: Outage | None = Outage.SCHEDULER
        self._since = clock()

    def set(self, current: Outage | None) -> None:
        """Set the outage in progress; None if there is none."""
        self._seconds = dict(self.seconds())
        self._current, self._since = current, self._clock()

    def seconds(self) -> Mapping[Outage, float]:
        """The sums so far."""
        seconds = dict(self._seconds)
        if self._current is not None:
            seconds[self._current] += self._clock() - self._since
        return seconds
