"""Arguments and results of a pool's scripts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TokenRanges:
    """Sampled tokens: parallel lists, one range of a sequence's output per place."""

    sequence_ids: list[int] = field(default_factory=list)  # below 2**64
    first_indices: list[int] = field(default_factory=list)  # within the sequence's output
    next_indices: list[int] = field(default_factory=list)  # one past the range's last token
    token_ids: list[int] = field(default_factory=list)  # concatenated
    # Packed, a string per range; empty if no range has any.
    logprobs: list[bytes] = field(default_factory=list)
    # The same of the prompt, for ranges that begin the output of a request that wants them.
    prompt_logprobs: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The tokens of one commit, as journaled."""

    step: int
    token_ranges: TokenRanges


class Publication(NamedTuple):
    """A held block whose content is now final, and may be hit."""

    block_id: int
    block_hash: bytes  # 32 bytes


@dataclass(frozen=True, slots=True)
class ForkedSequence:
    """A sequence that is forked and not admitted; its tokens are journaled from now on."""

    sequence_id: int
    num_output_tokens: int  # index of its next journaled token


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence to admit. Its block table is its hits, then its new blocks."""

    sequence_id: int
    num_output_tokens: int  # index of its next journaled token
    hit_hashes: Sequence[bytes]
    num_new_blocks: int
    fill_hashes: Sequence[bytes] = ()  # of the first new blocks, filled by this plan


@dataclass(frozen=True, slots=True)
class Commit:
    """One step of a pool, applied in the order of the fields."""

    step: int
    withdrawals: Sequence[int] = ()  # block ids whose hash is removed
    publications: Sequence[Publication] = ()
    token_ranges: TokenRanges = field(default_factory=TokenRanges)
    removed: Sequence[int] = ()  # sequence ids that are no longer journaled
    shared_blocks: Sequence[int] = ()  # held; each gains a reference per place
    returned_blocks: Sequence[int] = ()  # each loses a reference; tables are listed last to first
    taken_references: Sequence[int] = ()  # one block is taken per place, with this many references
    added: Sequence[ForkedSequence] = ()
    # Sequences whose whole block table is allocated here; these are added as well.
    admissions: Sequence[Admission] = ()


@dataclass(frozen=True, slots=True)
class CommitReply:
    """The blocks that a commit allocated, in the order of the commit's entries."""

    num_free_blocks: int
    taken: tuple[int, ...]
    admitted: tuple[tuple[int, ...] | None, ...]  # block tables; None: not admitted


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a query."""

    num_hits: int
    num_free_hits: int  # hits without references: using them takes free blocks
