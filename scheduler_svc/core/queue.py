"""The queue of all who wait for a worker."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.sequence import Sequence


class WaitingQueue:
    """In order: the preempted before the new ones, each by (priority, arrival, choice)."""

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
        insort(self._sequences, sequence, key=turn)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> bool:
        """False if it is not here."""
        index = bisect_left(self._sequences, turn(sequence), key=turn)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            return False
        del self._sequences[index]
        self.num_tokens -= len(sequence.token_ids)
        return True


def turn(sequence: Sequence) -> tuple[bool, tuple[int, int, int]]:
    """Unique among those that wait."""
    return (not sequence.was_preempted, sequence.order)
