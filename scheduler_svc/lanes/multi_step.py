"""How many tokens of each sequence one plan may have where all of them decode.

A plan costs the scheduler, Redis, the worker's event loop and their ways to each other a
millisecond or two of processor time, however short its step is. Where nobody reads tokens as they
come, one plan has several (multi-step scheduling, vLLM 0.6); what it costs is that who comes
meanwhile waits for it.
"""

from collections.abc import Callable, Iterable
from typing import Final

from scheduler_svc.core.sequence import Sequence

MOST_ROUNDS: Final = 16
# Where a stop token may end a sequence: what is sampled behind it, in its plan and in the one sent
# ahead, is lost.
MOST_ROUNDS_TO_A_STOP: Final = 2
# Who comes at intervals waits longer by such a part of them, per plan in flight.
_SHARE: Final = 0.1


class MultiStep:
    """One lane's."""

    def __init__(self, most_s: float, quiet_s: Callable[[], float]) -> None:
        """A plan of several rounds takes `most_s` at most; 0: there are none. `quiet_s` is how long
        nobody has come."""
        self._most_s = most_s
        self._quiet_s = quiet_s
        # Of the plan that came back last.
        self._round_s = 0.0

    def landed(self, round_s: float) -> None:
        """A plan that has given tokens has come back; each of its rounds took so long."""
        self._round_s = round_s

    def num_rounds(self, sequences: Iterable[Sequence]) -> int:
        """How often these may run in one plan, 1 at least."""
        plan_s = min(self._most_s, _SHARE * self._quiet_s())
        if not 0 < 2 * self._round_s <= plan_s:
            return 1
        num_rounds = min(MOST_ROUNDS, int(plan_s / self._round_s))
        for sequence in sequences:
            if not sequence.group.is_patient:
                return 1
            if sequence.stop_token_ids:
                num_rounds = min(num_rounds, MOST_ROUNDS_TO_A_STOP)
        return num_rounds
