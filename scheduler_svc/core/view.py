"""Input and output values of the policy: a lane's view, and the decision for one step."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Generic, Protocol, TypeVar


class Policy(StrEnum):
    """What one step may contain; see policy.py."""

    CHUNKED = "chunked"
    PREFILL_FIRST = "prefill_first"


class PreemptionMode(StrEnum):
    """How sequences are preempted: `auto` swaps groups of several rows, recomputes single rows."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


class BlockFit(Enum):
    """Whether a demand for blocks can be met."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Limits:
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    # Blocks that new requests must leave free.
    watermark: int
    policy: Policy = Policy.CHUNKED
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    # Prefills that a step may leave unfinished, and long prefills in progress; None: no limit.
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    # A longer prefill counts as long and is chunked to this size beside other prompts; 0: off.
    long_prefill_token_threshold: int = 0
    # Slots kept free for each decoding sequence beyond its next token.
    num_lookahead_slots: int = 0
    # Tokens of the longest sequence: no sequence gets blocks for more.
    max_model_len: int = 2**31

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prefill with `num_tokens` to compute counts as long."""
        return 0 < self.long_prefill_token_threshold < num_tokens

    def has_room_for_long(self, num_long: int) -> bool:
        """Whether one more long prefill may run beside `num_long` in progress."""
        most = self.max_long_partial_prefills
        return most is None or num_long < most

    def has_room_for_partial(self, num_partial: int) -> bool:
        """Whether a step may leave one more prefill unfinished beside `num_partial`."""
        most = self.max_num_partial_prefills
        return most is None or num_partial < most


class SequenceView(Protocol):
    """A sequence as the policy sees it, including the tokens of plans in flight."""

    @property
    def order(self) -> tuple[int, int, int]: ...  # (priority, arrival, choice)
    @property
    def is_abandoned(self) -> bool: ...  # its client has disconnected
    @property
    def is_beam(self) -> bool: ...  # it is preempted only together with its group
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_lookahead_tokens(self) -> int: ...  # that jumps and drafts may add
    @property
    def last_step(self) -> int: ...  # that ran it
    @property
    def block_ids(self) -> Sequence[int]: ...


# The caller's own type of sequence. A sequence that has a row is called `row` in the policy.
SeqT = TypeVar("SeqT", bound=SequenceView)


@dataclass(frozen=True, slots=True, eq=False)
class Forkable(Generic[SeqT]):
    """A group whose prompt is computed and whose siblings have no rows yet.

    The prompt's blocks belong to the row of `source` or, once that is released, to the group.
    """

    siblings: Sequence[SeqT]
    source: SeqT | None
    pinned_blocks: Sequence[int] | None


@dataclass(frozen=True, slots=True, eq=False)
class Swapped(Generic[SeqT]):
    """Sequences of one group whose `block_ids` are host blocks."""

    sequences: Sequence[SeqT]
    # Distinct blocks: siblings share some.
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Candidate(Generic[SeqT]):
    """A sequence waiting for a row, with its cached prefix."""

    sequence: SeqT
    # Hashes of its full blocks, first to last.
    block_hashes: Sequence[bytes]
    num_hits: int
    # Hits in free blocks: taking them reduces the number of free blocks.
    num_free_hits: int
    # Rows that its group will need.
    num_rows: int = 1
    # False: it has precedence, and is exempt from the watermark.
    is_new: bool = True

    def num_hits_with(self, planned: Set[bytes], block_size: int) -> int:
        """Leading blocks that are cached or in `planned`: filled by earlier admissions."""
        # The last token is always computed: its logits are needed.
        most = min((self.sequence.num_tokens - 1) // block_size, len(self.block_hashes))
        num_hits = min(self.num_hits, most)
        while num_hits < most and self.block_hashes[num_hits] in planned:
            num_hits += 1
        return num_hits


@dataclass(frozen=True, slots=True)
class LaneView(Generic[SeqT]):
    """State of one lane. Every list is in order."""

    running: Sequence[SeqT]
    num_free_blocks: int
    # Excludes block 0.
    num_usable_blocks: int
    # Number of block tables and pinned groups with each block; only read when blocks are short.
    references: Mapping[int, int] = field(default_factory=dict)
    forkable: Sequence[Forkable[SeqT]] = ()
    swapped: Sequence[Swapped[SeqT]] = ()
    num_free_host_blocks: int = 0
    candidates: Sequence[Candidate[SeqT]] = ()
    # Rows for siblings whose prompts are not computed yet.
    num_reserved_rows: int = 0
    # Tokens of prompts that the step may have beside decodes, also those in flight, at most.
    max_prompt_tokens: int = 2**31
    # Rounds of decoding allowed if the step runs nothing else.
    num_rounds: int = 1
    # Rounds of plans in flight with rows that may run: their jumps and drafts are not known yet.
    num_rounds_in_flight: int = 0
    # Of a worker with several stages: plans in flight have different rows, and decodes are divided
    # among so many of them.
    num_micro_batches: int = 1
    # Running rows whose last plan is in flight. They do not run, but may be preempted.
    in_flight: Set[SeqT] = frozenset()


@dataclass(frozen=True, slots=True)
class Admitted(Generic[SeqT]):
    """A candidate admitted in this step, with its first chunk."""

    sequence: SeqT
    num_hits: int
    num_scheduled_tokens: int
    num_new_blocks: int


@dataclass(frozen=True, slots=True)
class SwappedIn(Generic[SeqT]):
    """A group to swap in: per sequence, the tokens to compute and the blocks to append."""

    group: Swapped[SeqT]
    num_scheduled_tokens: list[int]
    num_new_blocks: list[int]


@dataclass(slots=True)
class StepDecision(Generic[SeqT]):
    """One step. Blocks are freed first, then taken in the order of the fields."""

    preempted: list[SeqT] = field(default_factory=list)  # to be recomputed
    swapped_out: list[list[SeqT]] = field(default_factory=list)  # group by group
    # Groups whose siblings can no longer be forked: they are admitted like new sequences.
    cancelled_forks: list[Forkable[SeqT]] = field(default_factory=list)
    # Swapped groups too large to swap in again: to be recomputed.
    discarded: list[Swapped[SeqT]] = field(default_factory=list)
    # Running rows and their token counts, in parallel; decodes, one token each, are first.
    num_decodes: int = 0
    scheduled: list[SeqT] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    # Beams for which even the whole pool has too few blocks.
    exhausted: list[SeqT] = field(default_factory=list)
    # Rounds of each row in `scheduled`; empty if all run once.
    num_rounds: list[int] = field(default_factory=list)
    appends: list[tuple[SeqT, int]] = field(default_factory=list)  # row, new blocks
    swapped_in: list[SwappedIn[SeqT]] = field(default_factory=list)
    forked: list[tuple[Forkable[SeqT], SeqT]] = field(default_factory=list)
    admitted: list[Admitted[SeqT]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """No row runs and none is preempted."""
        return not self.scheduled and self.only_decodes

    @property
    def only_decodes(self) -> bool:
        """No row is admitted or preempted, and no prompt is computed."""
        return len(self.scheduled) == self.num_decodes and not (
            self.admitted
            or self.forked
            or self.swapped_in
            or self.preempted
            or self.exhausted
            or self.swapped_out
            or self.cancelled_forks
            or self.discarded
        )
