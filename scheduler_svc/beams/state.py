"""The state of one group of beams: its search, and the beams that its rows hold. Pure.

The rows of a group hold the beams of one level: those after as many steps of the search. When each
of them has a result, the search chooses the next level. After a restart the levels since the last
common ancestor of all beams are known already; they are computed again in the same way, and their
results are not needed.
"""

import struct
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from quire.service.beams import ENTRY_BYTES, BeamStep
from scheduler_svc.beams.search import BeamSearch, SearchParams

_ENTRY: Final = struct.Struct("<IfI")


@dataclass(frozen=True, slots=True)
class Child:
    """A beam of the next level."""

    parent: int  # the index of the beam that it continues
    token_id: int


class BeamState:
    """Beams are numbered within their level. A beam's row is that of a choice of its group."""

    def __init__(self, params: SearchParams) -> None:
        self.search = BeamSearch(params)
        self._max_tokens = params.max_tokens  # as requested
        # A token per step, for the record and the journal.
        self.log = array("I")
        # By beam, its choice.
        self.choices = [0]
        # The next level, once it is chosen and until rows hold it.
        self.children: list[Child] | None = None
        self._known: deque[list[Child]] = deque()
        # By choice: the step whose result is awaited, and results that have arrived.
        self._awaited: dict[int, int] = {}
        self._results: dict[int, bytes] = {}

    @property
    def is_caught_up(self) -> bool:
        """All levels that are known have been computed."""
        return not self._known

    def limit(self, max_tokens: int) -> None:
        """Let the search end after so many tokens at most, as far as the model allows, and after as
        many as requested."""
        most = min(self._max_tokens, max_tokens)
        self.search.params = replace(self.search.params, max_tokens=most)

    def expect(self, choice: int, step: int) -> None:
        """Note a step that samples a beam."""
        self._awaited[choice] = step

    def forget_results(self) -> None:
        """Ignore what was computed of this level: it is computed again."""
        self._awaited.clear()
        self._results.clear()

    def take(self, choice: int, step: int, packed: bytes) -> bool:
        """Take the log-probabilities of a beam: of the sampled token, which does not count, then of
        the candidates. Whether all beams of the level have theirs now."""
        if self._awaited.get(choice) != step:
            return False
        del self._awaited[choice]
        self._results[choice] = packed
        return len(self._results) == len(self.choices)

    def choose(self) -> BeamStep | None:
        """Choose the next level. The step of the search; None if it was known."""
        results = [self._results[choice] for choice in self.choices]
        self._results.clear()
        if self._known:
            self.children = self._known.popleft()
            return None
        step = self.search.advance([_candidates(packed) for packed in results])
        self.log.append(step.token_id)
        if not self.search.is_done:
            self.children = [Child(one.parent, one.token_id) for one in step.running]
        return step

    def recover(self, packed: bytes, num_steps: int) -> None:
        """Replace the search by its first `num_steps` steps, which are packed."""
        self.search = BeamSearch(self.search.params)
        self.log = array("I")
        width = len(packed) // num_steps if num_steps else 0
        for at in range(num_steps):
            step = BeamStep.unpack(packed[at * width : (at + 1) * width])
            self.search.add(step)
            self.log.append(step.token_id)

    def restart(self) -> Sequence[int]:
        """Begin again with one row. The output tokens that it has: those that all beams share."""
        self.forget_results()
        self.children, self.choices = None, [0]
        self._known.clear()
        search = self.search
        if search.is_done:
            return ()
        beams = list(range(search.num_running))
        num_common = len(search.steps)
        for step in reversed(search.steps):
            if len(beams) == 1:
                break
            num_common -= 1
            parents = sorted({step.running[beam].parent for beam in beams})
            place = {parent: at for at, parent in enumerate(parents)}
            running = [step.running[beam] for beam in beams]
            self._known.appendleft([Child(place[one.parent], one.token_id) for one in running])
            beams = parents
        return search.path(0)[:num_common]


def _candidates(packed: bytes) -> list[tuple[int, float]]:
    entries = _ENTRY.iter_unpack(packed[ENTRY_BYTES:])
    return [(token_id, logprob) for token_id, logprob, _ in entries]
