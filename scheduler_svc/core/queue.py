"""The queue of sequences that wait for a worker, and the time since the last one arrived."""

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from scheduler_svc.core.fairness import FairShares
from scheduler_svc.core.sequence import Group, Sequence

# Faster than a function: it is called for each comparison.
_order = attrgetter("order")


class WaitingQueue:
    """Sequences with precedence, in order of (priority, arrival, choice); then new ones.

    New sequences are in order of priority. Among principals of equal priority, the one with the
    lowest counter is next (`FairShares`); its sequences are in order of (arrival, choice). With one
    principal this is the order of (priority, arrival, choice).
    """

    def __init__(self, shares: FairShares) -> None:
        self.num_tokens = 0
        self._shares = shares
        self._preceding: list[Sequence] = []
        # By principal, in order; no list is empty.
        self._new: dict[str, list[Sequence]] = {}
        self._num_tokens_of: Counter[str] = Counter()
        # How often the principal served last has changed.
        self._num_changes = 0

    def __len__(self) -> int:
        return len(self._preceding) + sum(map(len, self._new.values()))

    def __bool__(self) -> bool:
        return bool(self._preceding or self._new)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.first(len(self)))

    def groups(self) -> list[Group]:
        """Requests of which a sequence waits, in order."""
        return list(dict.fromkeys(sequence.group for sequence in self))

    @property
    def head(self) -> Sequence | None:
        return next(iter(self.first(1)), None)

    @property
    def is_contended(self) -> bool:
        """Whether several principals have new sequences."""
        return len(self._new) > 1

    def has_new(self, principal: str) -> bool:
        """Whether a new sequence of this principal is queued."""
        return principal in self._new

    def num_tokens_of(self, principal: str) -> int:
        """Tokens of a principal's queued sequences."""
        return self._num_tokens_of[principal]

    def first(self, count: int) -> list[Sequence]:
        """The next sequences in the order in which they would be dispatched now."""
        first = self._preceding[:count]
        if len(first) < count and self._new:
            first += self._first_new(count - len(first))
        return first

    def _first_new(self, count: int) -> list[Sequence]:
        if len(self._new) == 1:
            [sequences] = self._new.values()
            return sequences[:count]
        shares = self._shares
        # One entry per principal: its next sequence, after its counter as charged until then.
        entries = []
        for principal, sequences in self._new.items():
            head, counter = sequences[0], shares.of(principal).counter
            entries.append((head.order[0], counter, head.order, principal, 0))
        heapify(entries)
        first: list[Sequence] = []
        while entries and len(first) < count:
            _, counter, _, principal, index = entries[0]
            sequences = self._new[principal]
            first.append(sequences[index])
            counter += shares.prompt_cost(sequences[index])
            if (index := index + 1) < len(sequences):
                order = sequences[index].order
                heapreplace(entries, (order[0], counter, order, principal, index))
            else:
                heappop(entries)
        return first

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. One that was dispatched and not admitted is refunded."""
        principal = sequence.group.key.principal
        was_dispatched = self._shares.refund_prompt(sequence)
        if sequence.has_precedence:
            insort(self._preceding, sequence, key=_order)
        else:
            if principal not in self._new and not was_dispatched:
                self._shares.lift(principal, self._least_counter(sequence))
            insort(self._new.setdefault(principal, []), sequence, key=_order)
        self.num_tokens += len(sequence.token_ids)
        self._num_tokens_of[principal] += len(sequence.token_ids)

    def _least_counter(self, sequence: Sequence) -> float:
        """The least counter of the principals that wait at a sequence's priority; if none does,
        that of the one that was dispatched last."""
        priority = sequence.order[0]
        waiting = [
            self._shares.of(principal).counter
            for principal, sequences in self._new.items()
            if sequences[0].order[0] == priority
        ]
        last = self._shares.last_served
        return min(waiting, default=0.0 if last is None else self._shares.of(last).counter)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence; False if it is not queued."""
        principal = sequence.group.key.principal
        sequences = self._preceding if sequence.has_precedence else self._new.get(principal, [])
        index = bisect_left(sequences, _order(sequence), key=_order)
        if index == len(sequences) or sequences[index] is not sequence:
            return False
        del sequences[index]
        if not sequences and sequences is not self._preceding:
            del self._new[principal]
        self.num_tokens -= len(sequence.token_ids)
        self._num_tokens_of[principal] -= len(sequence.token_ids)
        return True

    def dispatch(self, sequence: Sequence) -> None:
        """Remove a queued sequence that goes to a lane, and charge its principal."""
        self.remove(sequence)
        if sequence.has_precedence:
            return
        principal = sequence.group.key.principal
        if principal != self._shares.last_served:
            self._shares.last_served = principal
            self._num_changes += 1
        sequence.dispatch_number = self._num_changes
        self._shares.charge_prompt(sequence)


def assigned_order(sequence: Sequence) -> tuple[bool, int, int, int, int]:
    """Sort key of a lane's assigned sequences: within a priority, principals keep the order in
    which they were dispatched."""
    priority, arrival, choice = sequence.order
    number = 0 if sequence.has_precedence else sequence.dispatch_number
    return not sequence.has_precedence, priority, number, arrival, choice


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
