"""The rows of a steady lane as parallel lists."""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable

from scheduler_svc.core.request import Delivery
from scheduler_svc.core.sequence import Sequence, Subscriber
from scheduler_svc.core.view import Limits
from scheduler_svc.lane.steps.step_builder import take_publications
from scheduler_svc.store.types import Publication


class DecodeColumns:
    """Rows that gain one token per step. The sequences stay up to date; what follows from the
    number of steps alone is computed once."""

    def __init__(self, sequences: list[Sequence], limits: Limits, publishes: bool) -> None:
        self.sequences = sequences
        self.rows = [sequence.row for sequence in sequences if sequence.row is not None]
        self.sequence_ids = [sequence.sequence_id for sequence in sequences]
        # Of each output, the first token that is not journaled.
        self.next_indices = [sequence.num_journaled for sequence in sequences]
        self._limits = limits
        self._groups = [sequence.group for sequence in sequences]
        self._choices = [sequence.choice for sequence in sequences]
        self._ones = [1] * len(sequences)
        self._token_ids = [sequence.token_ids for sequence in sequences]
        self._stop_token_ids = frozenset[int]().union(
            *{sequence.stop_token_ids for sequence in sequences}
        )
        # Steps until the last token of the first sequence to end is in flight.
        self.num_left = min(other.max_num_tokens - other.num_tokens for other in sequences)
        # Steps so far, those that the sequences do not count yet, and the last one.
        self._num_steps = self._num_unsynced = self._last_step = 0
        # By step, sequences that need a block, and those of which a block becomes full.
        self._growing: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._filling: defaultdict[int, list[Sequence]] = defaultdict(list)
        for sequence in sequences:
            self._plan_growth(sequence)
            if publishes and sequence.blocks_are_valid:
                end = (sequence.num_published_blocks + 1) * limits.block_size
                self._filling[max(0, end - len(sequence.token_ids) - 1)].append(sequence)

    def _plan_growth(self, sequence: Sequence) -> None:
        """Note the step in which its tokens, and what the worker may write beyond them, need more
        than its blocks."""
        limits = self._limits
        num_slots = len(sequence.block_ids) * limits.block_size
        if num_slots < limits.max_model_len:
            num_tokens = sequence.num_tokens + self._num_unsynced
            num_steps = num_slots - num_tokens - limits.num_lookahead_slots + 1
            self._growing[self._num_steps + max(0, num_steps)].append(sequence)

    def has_stop(self, token_ids: Iterable[int]) -> bool:
        """Whether a token may end its sequence."""
        return bool(self._stop_token_ids) and not self._stop_token_ids.isdisjoint(token_ids)

    def growing(self) -> list[Sequence]:
        """Sequences that need one more block in the next step."""
        return self._growing.get(self._num_steps, [])

    def advance(self, token_ids: list[int], step: int) -> list[Publication]:
        """Append a token to each sequence and schedule the next one in this step; return the blocks
        that are full of known tokens now."""
        # The loop runs in C.
        deque(map(array.append, self._token_ids, token_ids), maxlen=0)
        self._last_step = step
        self._num_unsynced += 1
        self.num_left -= 1
        filling = self._filling.pop(self._num_steps, None)
        self._growing.pop(self._num_steps, None)
        self._num_steps += 1
        if filling is None:
            return []
        # All of them fill the next block together.
        self._filling[self._num_steps - 1 + self._limits.block_size] += filling
        publications: list[Publication] = []
        for sequence in filling:
            num_known = len(sequence.token_ids)
            publications += take_publications(sequence, num_known, self._limits.block_size)
        return publications

    def sync(self) -> None:
        """Bring the counts of the sequences up to date. They are written when the steady state
        ends, since only the lane's loop reads them."""
        num_steps, self._num_unsynced = self._num_unsynced, 0
        if num_steps:
            for sequence in self.sequences:
                sequence.num_computed_tokens += num_steps
                sequence.num_tokens += num_steps
                sequence.last_step = self._last_step

    def grow(self, sequences: list[Sequence], block_ids: Iterable[int]) -> None:
        """Add a block to each of these sequences."""
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids.append(block_id)
            self._plan_growth(sequence)

    def journaled(self, next_indices: list[int]) -> None:
        """Redis has the tokens up to these indices."""
        self.next_indices = next_indices
        for sequence, next_index in zip(self.sequences, next_indices, strict=True):
            sequence.num_journaled = next_index

    def deliver(
        self, first_indices: list[int], token_ids: list[int], may_be_ended: bool = False
    ) -> None:
        """Send each subscriber its tokens; with `may_be_ended` not those of truncated outputs."""
        attachments = [group.attachment for group in self._groups]
        tokens = Delivery(attachments, self._choices, first_indices, self._ones, token_ids)
        subscribers = [group.subscriber for group in self._groups]
        first = subscribers[0]
        if not may_be_ended and subscribers.count(first) == len(subscribers):
            first.deliver(tokens)
            return
        places: dict[Subscriber, list[int]] = {}
        for at, subscriber in enumerate(subscribers):
            if not (may_be_ended and self.sequences[at].is_truncated):
                places.setdefault(subscriber, []).append(at)
        for subscriber, theirs in places.items():
            subscriber.deliver(tokens.part(theirs))
