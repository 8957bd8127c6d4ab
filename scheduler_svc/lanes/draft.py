"""What a step will commit and send, as it is gathered."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes.plan import Changes
from scheduler_svc.lanes.rows import Rows
from scheduler_svc.store.types import Publication, TokenRuns


@dataclass(slots=True)
class Draft:
    """Verbs that are the same whoever leaves or comes. The lane's rows follow at once."""

    number: int
    rows: Rows
    block_size: int
    # Blocks may be shared by their hashes.
    hashed: bool
    # As the policy may count on them: those that come free in this step included.
    num_free_blocks: int
    changes: Changes = field(default_factory=Changes)

    # For the commit.
    withdrawals: list[int] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    runs: TokenRuns = field(default_factory=TokenRuns)
    forgotten: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)

    # For those who are to be told once it is through: whose tokens are in `runs`, who is over,
    # and who waits for a row again.
    journaled: list[Sequence] = field(default_factory=list)
    left: list[Sequence] = field(default_factory=list)
    recalled: list[Sequence] = field(default_factory=list)

    # Scheduled sequences, and those that sample.
    sequences: list[Sequence] = field(default_factory=list)
    due: list[Sequence] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nobody leaves, and nothing is to be told."""
        return self.all_stay and not self.journaled

    @property
    def all_stay(self) -> bool:
        """Nobody leaves, and nothing is given back."""
        return not (
            self.changes.released_rows
            or self.forgotten
            or self.returned
            or self.withdrawals
            or self.left
            or self.recalled
        )

    def hashes(self, sequence: Sequence) -> list[bytes]:
        return sequence.hashes() if self.hashed else []

    def publish(self, sequence: Sequence) -> None:
        """Its blocks that are full of known tokens, once the step being planned has run."""
        if not (self.hashed and sequence.blocks_are_sound):
            return
        first = sequence.num_published_blocks
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        num_full = min(num_known // self.block_size, len(sequence.block_ids))
        if num_full > first:
            block_ids, hashes = sequence.block_ids[first:num_full], sequence.hashes()
            self.publications += map(Publication, block_ids, hashes[first:num_full])
            sequence.num_published_blocks = num_full

    def journal(self, fresh: Iterable[Sequence]) -> None:
        """Takes up what sequences have got since the last commit."""
        # Comprehensions, for this runs over all rows in every step.
        self.journaled = journaled = [
            # Few have ended, and only these may be cut.
            other
            for other in fresh
            if other.group.error is None and (other.end is None or not other.is_cut)
        ]
        first_indices = [sequence.num_journaled for sequence in journaled]
        next_indices = [len(other.token_ids) - other.num_prompt_tokens for other in journaled]
        if sum(next_indices) - sum(first_indices) == len(journaled):
            token_ids = [sequence.token_ids[-1] for sequence in journaled]
        else:
            token_ids = [token for sequence in journaled for token in sequence.unjournaled]
        self.runs = TokenRuns(
            sequence_ids=[sequence.sequence_id for sequence in journaled],
            first_indices=first_indices,
            next_indices=next_indices,
            token_ids=token_ids,
            logprobs=_logprobs(journaled, first_indices, next_indices),
        )
        block_size = self.block_size
        full = [
            other
            for other in journaled
            if len(other.token_ids) >= (other.num_published_blocks + 1) * block_size
        ]
        for sequence in full:
            if sequence.row is not None:
                self.publish(sequence)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """The step computes so many tokens of it, and samples the next behind the last one."""
        sequence.num_computed_tokens += num_tokens
        sequence.last_step = self.number
        self.sequences.append(sequence)
        if sequence.num_computed_tokens == sequence.num_tokens:
            sequence.num_tokens += 1
            self.due.append(sequence)

    def share(self, block_ids: list[int]) -> None:
        self.shared += block_ids
        self.rows.hold(block_ids)

    def give_back(self, block_ids: list[int]) -> None:
        """From last to first, so that a prefix outlives its tails."""
        self.returned += reversed(block_ids)
        self.num_free_blocks += self.rows.let_go(block_ids)

    def release(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Takes its row back, and these of its blocks."""
        self.publish(sequence)
        self.give_back(block_ids)
        self.changes.released_rows.append(self.rows.release(sequence))


def _logprobs(
    sequences: list[Sequence], first_indices: list[int], next_indices: list[int]
) -> list[bytes]:
    """Of the tokens between the indices; nothing where nobody asked."""
    if not [True for sequence in sequences if sequence.logprobs]:
        return []
    runs = zip(sequences, first_indices, next_indices, strict=True)
    return [sequence.logprobs_of(first, end) for sequence, first, end in runs]
