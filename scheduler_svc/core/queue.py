"""The queue of sequences that wait for a worker, and the time since the last one arrived."""

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scheduler_svc.core.sequence import Sequence


class WaitingQueue:
    """Sequences with precedence, then new ones, each in order of (priority, arrival, choice)."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def first(self, count: int) -> list[Sequence]:
        return self._sequences[:count]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=queue_order)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence; False if it is not queued."""
        index = bisect_left(self._sequences, queue_order(sequence), key=queue_order)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            return False
        del self._sequences[index]
        self.num_tokens -= len(sequence.token_ids)
        return True


def queue_order(sequence: Sequence) -> tuple[bool, tuple[int, int, int]]:
    """Sort key of the queue; unique among waiting sequences."""
    return (not sequence.has_precedence, sequence.order)


class Arrivals:
    """Times of all requests' arrivals. Lanes batch more, or plan further ahead, accordingly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_at = clock()
        self._num_pending = 0

    def queued(self) -> None:
        """Record that a request was queued for a lane."""
        self._last_at = self._clock()

    @contextmanager
    def pending(self, num_requests: int) -> Iterator[None]:
        """Count requests that are being stored; each is queued or refused before the block ends."""
        self._num_pending += num_requests
        try:
            yield
        finally:
            self._num_pending -= num_requests

    def since_last_arrival_s(self) -> float:
        """Seconds since the last arrival; 0 while requests are pending."""
        return 0.0 if self._num_pending else self._clock() - self._last_at
