"""What the policy sees of a lane, and what it decides: values, nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Generic, Protocol, TypeVar


class Policy(StrEnum):
    """What goes into one step, see policy.py."""

    CHUNKED = "chunked"
    PREFILL_FIRST = "prefill_first"


class PreemptionMode(StrEnum):
    """How blocks are taken back: `auto` swaps groups of which several run, recomputes others."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


class Fit(Enum):
    """Whether a need can be met."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Limits:
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    # Blocks that new requests leave free.
    watermark: int
    policy: Policy = Policy.CHUNKED
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    # Prefills that a step may leave unfinished, and long ones among those under way; None: any.
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    # A longer prefill is long, and its chunks are cut to this where others want to run; 0: off.
    long_prefill_token_threshold: int = 0
    num_lookahead_slots: int = 0
    # Tokens of the longest sequence: nobody is given room for more.
    max_model_len: int = 2**31

    def is_long(self, num_tokens: int) -> bool:
        """Of a prefill with so many tokens to compute."""
        return 0 < self.long_prefill_token_threshold < num_tokens

    def has_room_for_long(self, num_long: int) -> bool:
        """One more long prefill may run beside so many."""
        most = self.max_long_partial_prefills
        return most is None or num_long < most


class Row(Protocol):
    """A sequence as the policy sees it. The tokens of plans in flight count as there."""

    @property
    def order(self) -> tuple[int, int, int]: ...  # (priority, arrival, choice)
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True, eq=False)
class Forkable(Generic[R]):
    """A group whose prompt is computed and whose siblings have not got rows yet.

    The prompt's blocks are in the row of `source` or, when that has left, held by the group.
    """

    siblings: Sequence[R]
    source: R | None
    hold: Sequence[int] | None


@dataclass(frozen=True, slots=True, eq=False)
class Swapped(Generic[R]):
    """Sequences of one group whose `block_ids` are host blocks."""

    sequences: Sequence[R]
    # Distinct ones: siblings share.
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Candidate(Generic[R]):
    """A sequence that wants a row, with what the cache holds of it."""

    sequence: R
    # Of its full blocks, first to last.
    block_hashes: Sequence[bytes]
    num_hits: int
    # Hits that nobody holds: taking them costs free blocks.
    num_free_hits: int
    # Rows that its group will want.
    num_rows: int = 1
    # The watermark does not bind those that were preempted.
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class View(Generic[R]):
    """What a lane has. Every list is in order."""

    running: Sequence[R]
    num_free_blocks: int
    # Without block 0.
    num_usable_blocks: int
    # How many tables and holds each held block stands in; only asked when blocks are short.
    references: Mapping[int, int] = field(default_factory=dict)
    forkable: Sequence[Forkable[R]] = ()
    swapped: Sequence[Swapped[R]] = ()
    num_free_host_blocks: int = 0
    candidates: Sequence[Candidate[R]] = ()
    # Rows for siblings whose prompts are not computed yet.
    num_reserved_rows: int = 0
    # How often decodes may run in the step where nothing else does.
    num_rounds: int = 1


@dataclass(frozen=True, slots=True)
class Admitted(Generic[R]):
    """A candidate's first part of a step."""

    sequence: R
    num_hits: int
    num_scheduled_tokens: int
    num_new_blocks: int


@dataclass(frozen=True, slots=True)
class SwappedIn(Generic[R]):
    """A group that comes back: what each of its sequences computes, and takes beyond its blocks."""

    group: Swapped[R]
    num_scheduled_tokens: list[int]
    num_new_blocks: list[int]


@dataclass(slots=True)
class Decision(Generic[R]):
    """One step. First blocks come free, then they are taken in the order of the fields."""

    preempted: list[R] = field(default_factory=list)  # to be recomputed
    swapped_out: list[list[R]] = field(default_factory=list)  # group by group
    # Groups whose siblings cannot be forked any more: they are admitted like others.
    unforked: list[Forkable[R]] = field(default_factory=list)
    # Swapped groups that the pool can never hold again as they are: to be recomputed.
    given_up: list[Swapped[R]] = field(default_factory=list)
    # Running rows and the tokens each computes, in parallel; decodes, one token each, come first.
    num_decodes: int = 0
    scheduled: list[R] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    # How often each of `scheduled` runs, where some run more than once; no entries elsewhere.
    num_rounds: list[int] = field(default_factory=list)
    appends: list[tuple[R, int]] = field(default_factory=list)  # where rows need blocks
    swapped_in: list[SwappedIn[R]] = field(default_factory=list)
    forked: list[tuple[Forkable[R], R]] = field(default_factory=list)
    admitted: list[Admitted[R]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nobody runs, nobody gives way."""
        return not self.scheduled and self.only_decodes

    @property
    def only_decodes(self) -> bool:
        """Nobody comes or gives way, and no prompt gets on."""
        return len(self.scheduled) == self.num_decodes and not (
            self.admitted
            or self.forked
            or self.swapped_in
            or self.preempted
            or self.swapped_out
            or self.unforked
            or self.given_up
        )
