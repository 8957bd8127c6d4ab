"""Chooses how many decode rounds one plan may have.

A plan costs the scheduler, Redis, the worker's event loop and the connections between them a
millisecond or two of processor time, however short its step is. If tokens are not sent one by one,
one plan has several rounds (multi-step scheduling, vLLM 0.6). The cost: a request that arrives
during the plan waits for its end.
"""

from collections.abc import Callable, Iterable
from typing import Final

from scheduler_svc.core.sequence import Sequence

MAX_ROUNDS: Final = 16
# Where a stop token may end a sequence: tokens sampled after it, in its plan and in the one sent
# ahead, are lost.
MAX_ROUNDS_BEFORE_STOP: Final = 2
# A plan lasts at most this share of the time since the last arrival. So each plan in flight delays
# a request by at most this share of the time between two arrivals.
_SHARE: Final = 0.1


class MultiStep:
    """Round counts for the plans of one lane."""

    def __init__(self, max_s: float, since_last_arrival_s: Callable[[], float]) -> None:
        """`max_s` bounds a plan of several rounds; 0 disables them. `since_last_arrival_s` is
        called for each plan."""
        self._max_s = max_s
        self._since_last_arrival_s = since_last_arrival_s
        # Duration of a round of the plan that completed last.
        self._round_s = 0.0

    def completed(self, round_s: float) -> None:
        """Record the duration of each round of a plan that sampled tokens."""
        self._round_s = round_s

    def is_possible(self) -> bool:
        """Whether two rounds are short enough for one plan now."""
        return self._most_rounds() > 1

    def num_rounds(self, sequences: Iterable[Sequence]) -> int:
        """Rounds that these sequences may run in one plan, at least 1: no more than one of them has
        tokens in a frame."""
        num_rounds = self._most_rounds()
        for sequence in sequences:
            if num_rounds == 1 or sequence.is_beam:
                return 1
            num_rounds = min(num_rounds, sequence.group.tokens_per_frame)
            if sequence.stop_token_ids:
                num_rounds = min(num_rounds, MAX_ROUNDS_BEFORE_STOP)
        return num_rounds

    def _most_rounds(self) -> int:
        plan_s = min(self._max_s, _SHARE * self._since_last_arrival_s())
        if not 0 < 2 * self._round_s <= plan_s:
            return 1
        return min(MAX_ROUNDS, int(plan_s / self._round_s))
