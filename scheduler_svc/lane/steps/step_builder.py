"""Accumulates what a step will commit and send."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.plan import PlanContents
from scheduler_svc.lane.sequence_table import Rows
from scheduler_svc.store.types import Publication, TokenRanges


@dataclass(slots=True)
class StepBuilder:
    """The step being built. Operations update the lane's rows immediately."""

    step_number: int
    rows: Rows
    block_size: int
    enable_prefix_caching: bool
    # Includes the blocks that this step frees.
    num_free_blocks: int
    plan: PlanContents = field(default_factory=PlanContents)

    # For the commit.
    withdrawals: list[int] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    token_ranges: TokenRanges = field(default_factory=TokenRanges)
    removed: list[int] = field(default_factory=list)  # sequences no longer journaled
    shared: list[int] = field(default_factory=list)  # blocks that gain a reference
    returned: list[int] = field(default_factory=list)  # blocks that lose one

    # To notify after the commit: sequences with tokens in `token_ranges`; sequences that have
    # ended and hold no resources; sequences that wait for a row again.
    journaled: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    requeued: list[Sequence] = field(default_factory=list)

    # Scheduled sequences, and those that sample.
    sequences: list[Sequence] = field(default_factory=list)
    sampling: list[Sequence] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing is released or shared, and no token is journaled."""
        return self.releases_nothing and not (self.journaled or self.shared)

    @property
    def releases_nothing(self) -> bool:
        """No row or block is released, no sequence finished or requeued."""
        return not (
            self.plan.released_rows
            or self.removed
            or self.returned
            or self.withdrawals
            or self.finished
            or self.requeued
        )

    def hashes(self, sequence: Sequence) -> list[bytes]:
        return sequence.hashes() if self.enable_prefix_caching else []

    def publish(self, sequence: Sequence) -> None:
        """Publish its blocks that this step, once run, leaves full of known tokens."""
        if self.enable_prefix_caching and sequence.blocks_are_valid:
            num_known = min(sequence.num_written_tokens, len(sequence.token_ids))
            self.publications += take_publications(sequence, num_known, self.block_size)

    def journal(self, uncommitted: Iterable[Sequence]) -> None:
        """Journal the tokens of these sequences since the last commit."""
        # Comprehensions, because this runs over all rows in every step.
        self.journaled = journaled = [
            other
            for other in uncommitted
            # `not is_truncated` inlined: few have ended, and only these need the call.
            if other.group.error is None and (other.end is None or not other.is_truncated)
        ]
        first_indices = [sequence.num_journaled for sequence in journaled]
        has_beams = bool([True for sequence in journaled if sequence.group.beams is not None])
        if has_beams:
            next_indices = [sequence.num_output_tokens for sequence in journaled]
        else:
            next_indices = [len(other.token_ids) - other.num_prompt_tokens for other in journaled]
        if not has_beams and sum(next_indices) - sum(first_indices) == len(journaled):
            token_ids = [sequence.token_ids[-1] for sequence in journaled]
        else:
            token_ids = [token for sequence in journaled for token in sequence.unjournaled]
        self.token_ranges = TokenRanges(
            sequence_ids=[sequence.sequence_id for sequence in journaled],
            first_indices=first_indices,
            next_indices=next_indices,
            token_ids=token_ids,
            logprobs=_logprobs(journaled, first_indices, next_indices),
            prompt_logprobs=_prompt_logprobs(journaled, first_indices),
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
        """Schedule `num_tokens` of a sequence, and sampling if they reach its last token."""
        sequence.num_computed_tokens += num_tokens
        sequence.last_step = self.step_number
        self.sequences.append(sequence)
        sequence.num_certain_tokens += num_tokens
        if sequence.num_computed_tokens == sequence.num_tokens:
            self.sampling.append(sequence)
            if sequence.group.beams is None:
                sequence.num_tokens += 1
            else:
                sequence.group.beams.expect(sequence.choice, self.step_number)

    def share(self, block_ids: list[int]) -> None:
        self.shared += block_ids
        self.rows.add_references(block_ids)

    def return_blocks(self, block_ids: list[int]) -> None:
        """Return blocks last to first, so that prefixes stay cached longer than their tails."""
        self.returned += reversed(block_ids)
        self.num_free_blocks += self.rows.drop_references(block_ids)

    def release(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Release its row, and return these of its blocks."""
        self.publish(sequence)
        self.return_blocks(block_ids)
        row = self.rows.release(sequence)
        if sequence.is_on_worker:
            self.plan.released_rows.append(row)
            sequence.is_on_worker = False


def take_publications(sequence: Sequence, num_known: int, block_size: int) -> list[Publication]:
    """Its blocks that are full with `num_known` tokens, which are known and written by the end of
    the step; from now on they count as published."""
    first = sequence.num_published_blocks
    num_full = min(num_known // block_size, len(sequence.block_ids))
    if num_full <= first:
        return []
    sequence.num_published_blocks = num_full
    block_ids, hashes = sequence.block_ids, sequence.hashes()
    if num_full == first + 1:
        return [Publication(block_ids[first], hashes[first])]
    return list(map(Publication, block_ids[first:num_full], hashes[first:num_full]))


def _logprobs(
    sequences: list[Sequence], first_indices: list[int], next_indices: list[int]
) -> list[bytes]:
    """Packed log-probabilities between the indices; empty if no sequence requests any."""
    if not [True for sequence in sequences if sequence.logprobs]:
        return []
    ranges = zip(sequences, first_indices, next_indices, strict=True)
    return [sequence.logprobs_of(first, end) for sequence, first, end in ranges]


def _prompt_logprobs(sequences: list[Sequence], first_indices: list[int]) -> list[bytes]:
    """Packed log-probabilities of prompts whose output begins; empty if no sequence has any."""
    if 0 not in first_indices:
        return []
    found = [
        bytes(sequence.prompt_logprobs) if first == 0 else b""
        for sequence, first in zip(sequences, first_indices, strict=True)
    ]
    return found if any(found) else []
