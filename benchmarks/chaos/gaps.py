"""Pauses between the messages of a stream, and their percentiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Window:
    """The time from a fault to the steady state, by the monotonic clock."""

    begin_s: float
    end_s: float

    def overlaps(self, pause: "Pause") -> bool:
        return pause.begin_s < self.end_s and pause.end_s > self.begin_s


@dataclass(frozen=True)
class Pause:
    """The time between two messages of a stream, or from the request to the first of them."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def longest_pause(times_s: Sequence[float], window: Window) -> Pause | None:
    """Return the longest pause that overlaps the window, in full length; None if there is none.

    `times_s` is ascending: a stream's messages, and its end or, if it runs, the present.
    """
    pauses = [Pause(earlier, later) for earlier, later in pairwise(times_s)]
    overlapping = [pause for pause in pauses if window.overlaps(pause)]
    return max(overlapping, key=lambda pause: pause.seconds, default=None)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by the nearest-rank method. `values` must not be empty."""
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(0, rank - 1)]


@dataclass(frozen=True)
class Spread:
    """Percentiles in seconds of `count` values."""

    count: int
    p50_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            return cls(0)
        return cls(len(values), percentile(values, 50), percentile(values, 99), max(values))


def threshold_s(baseline: Sequence[float]) -> float:
    """Return the least pause for which a stream counts as affected.

    It is three times the 99th percentile of the pauses without faults, within 0.25 s and 0.5 s: the
    upper limit keeps a slow machine from hiding what is measured.
    """
    ordinary_s = percentile(baseline, 99) if baseline else 0.0
    return min(0.5, max(0.25, 3 * ordinary_s))


@dataclass
class ByShard:
    """The longest pauses of streams, in seconds, by whether a fault has hit their shard."""

    hit: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def add(self, seconds: float, shards: frozenset[int], hit: frozenset[int]) -> None:
        """Add a stream. One that has moved counts as hit if one of its shards was, and one that no
        shard has recorded counts as another."""
        (self.hit if shards & hit else self.others).append(seconds)

    def __add__(self, other: "ByShard") -> "ByShard":
        return ByShard(self.hit + other.hit, self.others + other.others)
