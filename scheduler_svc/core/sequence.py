"""A request as a group of sequences: one prompt, and a token list for each of its choices."""

from array import array
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from quire.service.errors import RequestError
from scheduler_svc.beams.state import BeamState
from scheduler_svc.core.crashes import LoneCrashes
from scheduler_svc.core.logprobs import ENTRY_BYTES
from scheduler_svc.core.queue_times import QueueTimer
from scheduler_svc.core.request import Delivery, End, EndReason, Params
from scheduler_svc.store.hashing import HashChain
from scheduler_svc.store.requests import RequestKey, RequestRecord
from scheduler_svc.tracing.request_trace import RequestTrace

# Of an attachment: whether it is of this shard, the epoch of the term, its number.
Generation: TypeAlias = tuple[bool, int, int]


class Subscriber(Protocol):
    """Receiver of a request's tokens and end: its gateway's stream."""

    def deliver(self, delivery: Delivery) -> None: ...

    def ended(self, sequence: "Sequence", end: End) -> None: ...

    def failed(self, group: "Group", error: RequestError) -> None: ...


class NullSubscriber:
    """Discards everything; for requests that are attached to no stream."""

    def deliver(self, delivery: Delivery) -> None: ...

    def ended(self, sequence: "Sequence", end: End) -> None: ...

    def failed(self, group: "Group", error: RequestError) -> None: ...


@dataclass(slots=True, eq=False)
class Group:
    """A request. It is over once each of its sequences has ended, or at the first error."""

    # As accepted, without the prompt, which the sequences have.
    record: RequestRecord
    params: Params
    # The connection that receives its output; `attachment` is its number there.
    subscriber: Subscriber
    attachment: int = 0
    # Tokens of a choice that are sent together, but for its first one and its last ones.
    tokens_per_frame: int = 1
    # That of the stream; a newer stream has a greater one.
    attachment_generation: Generation = (False, 0, 0)
    # Its client has disconnected and may return.
    is_abandoned: bool = False
    # (priority, arrival); the smallest is served first. Set when the request is queued.
    order: tuple[int, int] = (0, 0)
    sequences: list["Sequence"] = field(default_factory=list)
    error: RequestError | None = None
    # Sequences that are not finished yet.
    num_live: int = 0
    queue_timer: QueueTimer | None = None  # until its first row; None for one of an earlier term
    # What its prompt has added to its principal's counter.
    prompt_charge: float = 0.0
    # The end of its record is written.
    is_end_recorded: bool = False
    trace: RequestTrace | None = None  # None unless spans of it are exported

    # Choices to fork from the prompt once it is computed.
    siblings: list["Sequence"] = field(default_factory=list)
    # The prompt's blocks, kept for the siblings after the first choice has ended.
    pinned_blocks: list[int] | None = None
    # Of a beam search. Its choices are the beams; those without a row are siblings. Outside of the
    # lane only the first is known: its output is the log of the search.
    beams: BeamState | None = None

    @property
    def outputs(self) -> list["Sequence"]:
        """The sequences whose output is journaled, delivered and recorded."""
        return self.sequences if self.beams is None else self.sequences[:1]

    @property
    def key(self) -> RequestKey:
        return self.record.key

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequences[0].num_prompt_tokens

    def fail(self, error: RequestError) -> None:
        """End every sequence with an error; the first error is kept."""
        if self.error is None and self.num_live:
            self.error = error


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice's tokens, its hash chain, and its place on a lane while it has one.

    token_ids:  [0, num_prompt_tokens) prompt   [.., end) sampled, known
                [.., num_tokens) sampled by plans in flight, not known yet
    cache:      [0, num_computed_tokens) written, or written by plans in flight
                [0, num_certain_tokens) for certain, if it has look-ahead
    output:     [0, num_recorded) in its record   [.., num_journaled) in the journal
                [.., end) not committed yet
    """

    sequence_id: int
    group: Group
    choice: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    # Includes the tokens that plans in flight will sample.
    num_tokens: int
    # Tokens that jumps and drafts may add in each step, as its lane decides. If it has any,
    # `num_tokens` is a lower bound while plans are in flight, and the last computed token of a
    # decoding sequence is an expectation.
    num_lookahead_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    # Of the output, packed; empty unless requested.
    logprobs: bytearray = field(default_factory=bytearray)
    # Of the prompt's tokens after the first one, as far as they are known; those of the request are
    # at its first choice.
    prompt_logprobs: bytearray = field(default_factory=bytearray)

    # Set when the model is known, before the sequence is first placed.
    chain: HashChain | None = None
    max_num_tokens: int = 0

    row: int | None = None
    is_on_worker: bool = False  # the worker's row has it, maybe without its last change
    # Of a beam that continues another one: it is admitted again, with a copy of this block.
    is_changed: bool = False
    copied_block: int | None = None
    # Device blocks; host blocks while the sequence is swapped out.
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    # Counted for sequences with look-ahead only.
    num_certain_tokens: int = 0
    # Leading blocks acquired with their contents: cache hits, or shared by a fork.
    num_hit_blocks: int = 0
    num_published_blocks: int = 0
    last_published_blocks: list[int] = field(default_factory=list)
    # False for a failed row and for sequences that share blocks with one: they publish nothing.
    blocks_are_valid: bool = True
    # It precedes new sequences and ignores the watermark: it was preempted, its lane or leader was
    # lost, or its fork was cancelled.
    has_precedence: bool = False
    # It had run when its lane or leader was lost, and has not been admitted again.
    was_lost: bool = False
    num_cached_tokens: int | None = None

    # Incarnation of its lane's worker; None in the queue.
    lane_incarnation: int | None = None
    # The last such worker; its cache may still hold what the sequence has computed.
    last_incarnation: int | None = None
    # The last step of its lane that scheduled it.
    last_step: int = 0
    # A worker was lost in a step that ran it: it runs alone next time.
    is_suspect: bool = False
    suspected_at: float = 0.0  # of time.monotonic
    lone_crashes: LoneCrashes = field(default_factory=LoneCrashes)

    # The number of changes of the principal among dispatched sequences, at its dispatch.
    dispatch_number: int = 0
    # Output tokens counted for its principal.
    num_counted_tokens: int = 0
    num_journaled: int = 0
    num_recorded: int = 0
    end: End | None = None
    # Output tokens to keep, if the gateway found the end in the text of more than are known.
    num_kept_tokens: int | None = None
    # It has ended and holds no resources; its subscriber has been notified of its end.
    is_finished: bool = False

    @property
    def is_first(self) -> bool:
        """The choice that computes the prompt; the other choices are forked from it."""
        return self.group.sequences[0] is self

    @property
    def num_wanted_prompt_logprobs(self) -> int:
        """Entries per prompt token; 0 if none are requested, or all are known."""
        wanted = self.group.params.num_prompt_logprobs
        if not (wanted and self.is_first):
            return 0
        num_known = len(self.prompt_logprobs) // (wanted * ENTRY_BYTES)
        return wanted if num_known < self.num_prompt_tokens - 1 else 0

    @property
    def num_cacheable_tokens(self) -> int:
        """Leading tokens that may be cache hits. A token that is not computed gives no
        log-probability of the next one, so there are none until all those before are known."""
        if wanted := self.num_wanted_prompt_logprobs:
            return len(self.prompt_logprobs) // (wanted * ENTRY_BYTES)
        return len(self.token_ids)

    @property
    def num_wanted_rows(self) -> int:
        """Rows that the sequence and the siblings to be forked from it need in all."""
        return 1 + len(self.group.siblings) if self.is_first else 1

    @property
    def order(self) -> tuple[int, int, int]:
        return (*self.group.order, self.choice)

    @property
    def is_abandoned(self) -> bool:
        return self.group.is_abandoned

    @property
    def is_beam(self) -> bool:
        """It runs with the other beams of its group or not at all."""
        return self.group.beams is not None

    @property
    def output(self) -> "array[int]":
        """Known output tokens; those of the log of a search."""
        if self.group.beams is not None:
            return self.group.beams.log if self.is_first else array("I")
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        num_tokens = len(self.token_ids) - self.num_prompt_tokens
        return num_tokens if self.group.beams is None else len(self.output)

    @property
    def num_served_tokens(self) -> int:
        """Output tokens as they count for the principal: those of all beams."""
        return self.num_output_tokens * max(1, self.group.params.beam_width)

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that the cache held at its first admission."""
        return min(self.num_cached_tokens or 0, self.num_prompt_tokens)

    @property
    def is_ended(self) -> bool:
        """It takes no more tokens; the lane's next plan releases its row."""
        return self.end is not None or self.group.error is not None

    @property
    def is_complete(self) -> bool:
        """Its last token is known or in flight: it needs no row any more."""
        return self.num_tokens >= self.max_num_tokens

    @property
    def is_truncated(self) -> bool:
        """No more of its tokens are journaled or delivered."""
        is_stopped = self.end is not None and self.end.reason is EndReason.STOP_STRING
        return is_stopped or self.group.error is not None

    @property
    def journaled(self) -> "array[int]":
        """Output that Redis has."""
        return self.output[: self.num_journaled]

    @property
    def unjournaled(self) -> "array[int]":
        """Output that Redis does not have yet."""
        return self.output[self.num_journaled :]

    @property
    def num_written_tokens(self) -> int:
        """Leading tokens that are computed for certain once the plans in flight have run."""
        return self.num_certain_tokens if self.num_lookahead_tokens else self.num_computed_tokens

    @property
    def published_blocks(self) -> list[int]:
        """Blocks whose hashes it published; without any now, those when it lost its last row."""
        held = self.block_ids[self.num_hit_blocks : self.num_published_blocks]
        return held or self.last_published_blocks

    @property
    def logprobs_bytes(self) -> int:
        """Packed size per output token."""
        return self.group.params.num_journaled_logprobs * ENTRY_BYTES

    def logprobs_of(self, first: int, end: int) -> bytes:
        """Packed log-probabilities of output tokens [first, end); empty unless requested."""
        width = self.logprobs_bytes
        return bytes(self.logprobs[first * width : end * width])

    def hashes(self) -> list[bytes]:
        """Hashes of its full blocks of known tokens, first to last."""
        assert self.chain is not None
        self.chain.extend_to(self.token_ids)
        return self.chain.hashes

    def set_max_num_tokens(self, max_model_len: int) -> None:
        """Set the maximum length from the request's and the model's limits."""
        max_tokens = self.group.params.max_tokens
        self.max_num_tokens = min(self.num_prompt_tokens + max_tokens, max_model_len)
        self._apply_kept_limit()

    def _apply_kept_limit(self) -> None:
        if self.num_kept_tokens is not None and self.max_num_tokens:
            most = self.num_prompt_tokens + self.num_kept_tokens
            self.max_num_tokens = min(self.max_num_tokens, most)

    def end_at_last_token(self) -> None:
        """End the sequence at its last token: a stop token, or the last one allowed."""
        last = self.token_ids[-1]
        if last in self.stop_token_ids:
            self.end = End(EndReason.STOP_TOKEN, self.num_output_tokens, last)
        else:
            self.end = End(EndReason.LENGTH, self.num_output_tokens)

    def end_in_text(self, num_output_tokens: int) -> None:
        """End the sequence where the gateway found the end in its text; the first end wins. Tokens
        that are missing, because they are being sampled again, are awaited first."""
        if not num_output_tokens > 0 or self.is_ended:
            return
        if num_output_tokens <= self.num_output_tokens:
            self.end = End(EndReason.STOP_STRING, num_output_tokens)
        else:
            self.num_kept_tokens = num_output_tokens
            self._apply_kept_limit()

    def end_if_complete(self) -> None:
        """End the sequence if its known tokens reach a stop token or the maximum length."""
        if self.end is None and self.num_output_tokens and not self.is_beam:
            is_long = self.num_output_tokens >= self.group.params.max_tokens
            is_long |= 0 < self.max_num_tokens <= len(self.token_ids)
            if is_long or self.token_ids[-1] in self.stop_token_ids:
                self.end_at_last_token()

    def set_lane(self, incarnation: int | None, lookahead: int = 0) -> None:
        """Set its lane, with its look-ahead, and that of the siblings to be forked from it."""
        for sequence in (self, *(self.group.siblings if self.is_first else ())):
            sequence.num_lookahead_tokens = self.group.params.lookahead_with(lookahead)
            sequence.lane_incarnation = incarnation
            sequence.last_incarnation = incarnation or sequence.last_incarnation
            # Each lane counts its own steps.
            sequence.last_step = 0

    def reset_blocks(self) -> None:
        """Forget its blocks: nothing of it is on a worker any more."""
        # Kept because a result in flight may report its row as failed.
        self.last_published_blocks = self.published_blocks
        self.block_ids = []
        self.num_computed_tokens = 0
        self.num_certain_tokens = 0
        self.num_hit_blocks = 0
        self.num_published_blocks = 0
        self.blocks_are_valid = True
        self.is_changed, self.copied_block = False, None
