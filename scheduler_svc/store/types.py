"""The values that go into a pool's scripts and come out of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Output tokens of one sequence that became known."""

    sequence_id: int  # below 2**64
    first_index: int  # of token_ids[0] within the sequence's output
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Publication:
    """A held block whose content is now known, and may be hit."""

    block_id: int
    block_hash: bytes  # 32 bytes


@dataclass(frozen=True, slots=True)
class Departure:
    """A sequence that leaves its row. The pool forgets its journal index."""

    sequence_id: int
    block_ids: tuple[int, ...]  # table order; freed from last to first


@dataclass(frozen=True, slots=True)
class Append:
    """Blocks that a running sequence needs more."""

    sequence_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that wants a row. Its block table is its hits, then its new blocks."""

    sequence_id: int
    num_output_tokens: int  # the index that its next journaled token has
    hit_hashes: tuple[bytes, ...]
    num_new_blocks: int
    fill_hashes: tuple[bytes, ...] = ()  # of the first new blocks, filled by this plan


@dataclass(frozen=True, slots=True)
class Commit:
    """One step of a pool, applied in the order of the fields."""

    step: int
    withdrawals: tuple[int, ...] = ()  # block ids whose hash is removed
    publications: tuple[Publication, ...] = ()
    runs: tuple[TokenRun, ...] = ()
    departures: tuple[Departure, ...] = ()
    appends: tuple[Append, ...] = ()
    admissions: tuple[Admission, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitReply:
    """What a commit handed out; entries stand in the order of the commit's."""

    num_free_blocks: int
    appended: tuple[tuple[int, ...], ...]
    admitted: tuple[tuple[int, ...] | None, ...]  # block tables; None: left out, without effect


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a query."""

    num_hits: int
    num_free_hits: int  # hit blocks without references now: taking them uses free blocks
