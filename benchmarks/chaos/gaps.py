"""How long streams stood still: arithmetic on the times of their messages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Window:
    """The time in which a fault has its effect, by the monotonic clock."""

    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Pause:
    """Between two messages of a stream."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def longest_pause(times_s: Sequence[float], window: Window) -> Pause | None:
    """The longest pause that overlaps the window, whole; None where none does.

    `times_s` rise: the request, each of its messages, its end, or, where it goes on, the present.
    """
    pauses = [
        Pause(earlier, later)
        for earlier, later in pairwise(times_s)
        if earlier < window.end_s and later > window.begin_s
    ]
    return max(pauses, key=lambda pause: pause.seconds, default=None)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many per cent do not exceed: the nearest rank. `values` are not
    empty."""
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(0, rank - 1)]


@dataclass(frozen=True)
class Spread:
    """Seconds, of so many values."""

    count: int
    p50_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            return cls(0)
        return cls(len(values), percentile(values, 50), percentile(values, 99), max(values))


def threshold_s(calm: Sequence[float]) -> float:
    """The pause from which on a stream counts as affected: three times what 99 % of the streams
    that nothing disturbs do not exceed, but no less than a quarter of a second, and no more than
    half of one: a machine that is slow must not hide what is measured."""
    ordinary_s = percentile(calm, 99) if calm else 0.0
    return min(0.5, max(0.25, 3 * ordinary_s))
