"""The values that go into a pool's scripts and come out of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Output tokens that became known: parallel lists, an interval of one sequence per place."""

    sequence_ids: list[int] = field(default_factory=list)  # below 2**64
    first_indices: list[int] = field(default_factory=list)  # within the sequence's output
    next_indices: list[int] = field(default_factory=list)  # behind the run's last token
    token_ids: list[int] = field(default_factory=list)  # concatenated
    # Packed, a string per run; no strings at all where no run has any.
    logprobs: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Publication:
    """A held block whose content is now known, and may be hit."""

    block_id: int
    block_hash: bytes  # 32 bytes


@dataclass(frozen=True, slots=True)
class Joined:
    """A sequence whose tokens are journaled from now on, without an admission (a fork)."""

    sequence_id: int
    num_output_tokens: int  # the index that its next journaled token has


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that wants a row. Its block table is its hits, then its new blocks."""

    sequence_id: int
    num_output_tokens: int  # the index that its next journaled token has
    hit_hashes: Sequence[bytes]
    num_new_blocks: int
    fill_hashes: Sequence[bytes] = ()  # of the first new blocks, filled by this plan


@dataclass(frozen=True, slots=True)
class Commit:
    """One step of a pool, applied in the order of the fields."""

    step: int
    withdrawals: Sequence[int] = ()  # block ids whose hash is removed
    publications: Sequence[Publication] = ()
    runs: TokenRuns = field(default_factory=TokenRuns)
    forgotten: Sequence[int] = ()  # sequence ids whose tokens are journaled no more
    shared_blocks: Sequence[int] = ()  # held; each gets one reference more per place
    returned_blocks: Sequence[int] = ()  # each loses one; a table is listed from last to first
    taken_references: Sequence[int] = ()  # a block is taken per place, with so many references
    joined: Sequence[Joined] = ()
    admissions: Sequence[Admission] = ()  # these join, too


@dataclass(frozen=True, slots=True)
class CommitReply:
    """What a commit handed out; entries stand in the order of the commit's."""

    num_free_blocks: int
    taken: tuple[int, ...]
    admitted: tuple[tuple[int, ...] | None, ...]  # block tables; None: left out, without effect


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a query."""

    num_hits: int
    num_free_hits: int  # hit blocks without references now: taking them uses free blocks
