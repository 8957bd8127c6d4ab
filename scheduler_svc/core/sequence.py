"""A request as a group of sequences: one prompt, and a token list for each of its choices."""

import hashlib
import struct
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from quire.service.errors import RequestError
from scheduler_svc.core.logprobs import ENTRY_BYTES
from scheduler_svc.store.hashing import HashChain
from scheduler_svc.store.requests import RequestKey


class EndReason(Enum):
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    STOP_STRING = "stop_string"


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence ended of itself."""

    reason: EndReason
    num_output_tokens: int
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Params:
    """Sampling parameters with every default filled in."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    # Of each sampled token: 0 none, k + 1 for itself and the top k.
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    min_p: float = 0.0


class Subscriber(Protocol):
    """Who hears of a request: its gateway's stream."""

    def deliver(self, delivery: "Delivery") -> None: ...

    def ended(self, sequence: "Sequence", end: End) -> None: ...

    def failed(self, group: "Group", error: RequestError) -> None: ...


class Nobody:
    """Hears of requests that are attached to no stream."""

    def deliver(self, delivery: "Delivery") -> None:
        pass

    def ended(self, sequence: "Sequence", end: End) -> None:
        pass

    def failed(self, group: "Group", error: RequestError) -> None:
        pass


@dataclass(slots=True)
class Delivery:
    """New tokens for one subscriber, all of them journaled; one place per sequence."""

    attachments: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    # Of the first token within the sequence's output.
    first_indices: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # concatenated
    # Packed, a string per place, empty where they were not asked for; no strings at all where
    # nobody asked.
    logprobs: list[bytes] = field(default_factory=list)


def seed_of_choice(seed: int, choice: int) -> int:
    """Choice 0 has the request's own seed; the others' are hashed from it."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(struct.pack("<QI", seed, choice)).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True, slots=True)
class Terms:
    """What the scheduler keeps of a request without reading it, but for the windows."""

    digest: bytes = b""
    # Serialized ResolvedParams.
    params: bytes = b""
    opaque: bytes = b""
    deadline_ms: int | None = None  # Unix time
    # How long it runs on when its client has gone; None: it does not.
    resume_window_s: int | None = None


@dataclass(slots=True, eq=False)
class Group:
    """A request. It is over when each of its sequences has ended, or with the first error."""

    key: RequestKey
    params: Params
    # Whom its stream belongs to; the attachment is the stream's number there.
    subscriber: Subscriber
    attachment: int = 0
    # Whoever asked reads nothing of it before its end.
    is_patient: bool = False
    # Of the stream: epoch and number. The newer of two streams has the greater one.
    turn: tuple[int, int] = (0, 0)
    # As its gateway gave it, for the record and for whoever attaches.
    terms: "Terms" = field(default_factory=lambda: Terms())
    # (priority, arrival); the smaller one is served first. Set when it is queued.
    order: tuple[int, int] = (0, 0)
    priority: int = 0
    cache_salt: bytes = b""
    sequences: list["Sequence"] = field(default_factory=list)
    error: RequestError | None = None
    # Sequences that have not left yet.
    num_live: int = 0
    # Its record has ended.
    is_closed: bool = False

    # Choices that are to be forked from the prompt once it is computed.
    siblings: list["Sequence"] = field(default_factory=list)
    # The prompt's blocks, while the group holds them for its siblings.
    hold: list[int] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequences[0].num_prompt_tokens

    def fail(self, error: RequestError) -> None:
        """Ends every sequence with an error; the first one stands."""
        if self.error is None and self.num_live:
            self.error = error


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice's tokens, its hash chain, and its place on a lane while it has one.

    token_ids:  [0, num_prompt_tokens) prompt   [.., end) sampled, known
                [.., num_tokens) sampled by plans in flight, not known yet
    cache:      [0, num_computed_tokens) written, or written by plans in flight
    output:     [0, num_folded) in its record   [.., num_journaled) in the journal
                [.., end) waiting for the next commit
    """

    sequence_id: int
    group: Group
    choice: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    # Those that plans in flight will sample count as there.
    num_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    # Of the output, packed, where they are asked for.
    logprobs: bytearray = field(default_factory=bytearray)

    # Set when the model is known, before the sequence is first considered.
    chain: HashChain | None = None
    max_num_tokens: int = 0

    row: int | None = None
    # Blocks of the device; of the host while the sequence is swapped out.
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    # Blocks that it got with their contents: of others, or of its own former life.
    num_hit_blocks: int = 0
    num_published_blocks: int = 0
    former_blocks: list[int] = field(default_factory=list)
    # A failed row, and who shares blocks with one, publishes nothing.
    blocks_are_sound: bool = True
    was_preempted: bool = False
    # It had begun when its lane or its leader was lost, and has no row again yet.
    was_lost: bool = False
    num_cached_tokens: int | None = None

    # The incarnation of the worker on whose lane it is; None in the queue.
    lane: int | None = None
    # The last one it was on; that worker's cache may have what it has computed.
    home: int | None = None
    # The last step of its lane that scheduled it.
    last_step: int = 0
    # It was in a step that a worker did not survive: it is tried alone.
    is_suspect: bool = False

    num_journaled: int = 0
    num_folded: int = 0
    end: End | None = None
    # Output that its gateway wants of it, where that has found a stop string further on.
    num_kept_tokens: int | None = None
    # It is over and holds nothing any more; its subscriber has heard of its end.
    has_left: bool = False

    @property
    def is_first(self) -> bool:
        """The choice that computes the prompt; the others are forked from it."""
        return self.group.sequences[0] is self

    @property
    def computes_prompt(self) -> bool:
        """Log-probabilities of the prompt are wanted: hits would leave them out."""
        return self.group.params.num_prompt_logprobs > 0

    @property
    def num_wanted_rows(self) -> int:
        """Rows that it and those to be forked from it will have."""
        return 1 + len(self.group.siblings) if self.is_first else 1

    @property
    def order(self) -> tuple[int, int, int]:
        return (*self.group.order, self.choice)

    @property
    def num_output_tokens(self) -> int:
        """Known ones."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that the cache held at its first admission."""
        return min(self.num_cached_tokens or 0, self.num_prompt_tokens)

    @property
    def is_over(self) -> bool:
        """It gives its row back in the lane's next plan, and takes no more tokens."""
        return self.end is not None or self.group.error is not None

    @property
    def is_complete(self) -> bool:
        """Its last token is known or on its way: it needs no row any more."""
        return self.num_tokens >= self.max_num_tokens

    @property
    def is_cut(self) -> bool:
        """Nothing more of it is journaled or delivered."""
        if self.group.error is not None:
            return True
        return self.end is not None and self.end.reason is EndReason.STOP_STRING

    @property
    def journaled(self) -> "array[int]":
        """Output that Redis has."""
        first = self.num_prompt_tokens
        return self.token_ids[first : first + self.num_journaled]

    @property
    def delivered(self) -> "array[int]":
        """Output that its subscriber has heard of, if there was one."""
        return self.journaled if self.end is None else self.journaled[: self.end.num_output_tokens]

    @property
    def unjournaled(self) -> "array[int]":
        """Output that Redis does not have yet."""
        return self.token_ids[self.num_prompt_tokens + self.num_journaled :]

    @property
    def published_blocks(self) -> list[int]:
        """Blocks that it published itself; those it had if it has none any more."""
        if not self.block_ids:
            return self.former_blocks
        return self.block_ids[self.num_hit_blocks : self.num_published_blocks]

    @property
    def logprobs_bytes(self) -> int:
        """Per token of output."""
        return self.group.params.num_logprobs * ENTRY_BYTES

    def logprobs_of(self, first: int, end: int) -> bytes:
        """Packed, of the output's tokens [first, end); empty where nobody asked."""
        width = self.logprobs_bytes
        return bytes(self.logprobs[first * width : end * width])

    def hashes(self) -> list[bytes]:
        """Hashes of its full blocks of known tokens, first to last."""
        assert self.chain is not None
        self.chain.extend_to(self.token_ids)
        return self.chain.hashes

    def limit(self, max_model_len: int) -> None:
        """Fixes the length at which the sequence ends at the latest."""
        max_tokens = self.group.params.max_tokens
        self.max_num_tokens = min(self.num_prompt_tokens + max_tokens, max_model_len)
        self._cut()

    def _cut(self) -> None:
        if self.num_kept_tokens is not None and self.max_num_tokens:
            most = self.num_prompt_tokens + self.num_kept_tokens
            self.max_num_tokens = min(self.max_num_tokens, most)

    def close(self) -> None:
        """Ends the sequence at its last token: it is a stop token, or there is room for no more."""
        last = self.token_ids[-1]
        if last in self.stop_token_ids:
            self.end = End(EndReason.STOP_TOKEN, self.num_output_tokens, last)
        else:
            self.end = End(EndReason.LENGTH, self.num_output_tokens)

    def finish(self, num_output_tokens: int) -> None:
        """Ends the sequence where the gateway found a stop string; the first end wins. Where tokens
        are still missing, because they are sampled again, it ends with the last of them."""
        if not num_output_tokens > 0 or self.is_over:
            return
        if num_output_tokens <= self.num_output_tokens:
            self.end = End(EndReason.STOP_STRING, num_output_tokens)
        else:
            self.num_kept_tokens = num_output_tokens
            self._cut()

    def end_if_complete(self) -> None:
        """Ends the sequence where its known tokens say that it is over."""
        if self.end is None and self.num_output_tokens:
            is_long = self.num_output_tokens >= self.group.params.max_tokens
            is_long |= 0 < self.max_num_tokens <= len(self.token_ids)
            if is_long or self.token_ids[-1] in self.stop_token_ids:
                self.close()

    def rewind(self) -> None:
        """Back to what is journaled, with nothing on any worker: its lane is gone. What was sampled
        behind it is sampled again, as it was."""
        del self.token_ids[self.num_prompt_tokens + self.num_journaled :]
        del self.logprobs[self.num_journaled * self.logprobs_bytes :]
        if self.chain is not None:
            self.chain.cut(len(self.token_ids))
        if self.end is not None and self.end.reason is not EndReason.STOP_STRING:
            self.end = None
        self.end_if_complete()
        # Whoever has begun goes before the new ones.
        self.was_lost |= self.last_step > 0
        self.was_preempted |= self.last_step > 0
        self.num_tokens = len(self.token_ids)
        self.row = self.lane = None
        self.last_step = 0
        self.lose_place()
        self.former_blocks = []

    def place_on(self, lane: int | None) -> None:
        """Its lane, and that of those to be forked from it."""
        for sequence in (self, *(self.group.siblings if self.is_first else ())):
            sequence.lane = lane
            sequence.home = lane or sequence.home

    def lose_place(self) -> None:
        """Nothing of it is on a worker any more."""
        # A result that is on its way may say that they were spoilt.
        self.former_blocks = self.published_blocks
        self.block_ids = []
        self.num_computed_tokens = 0
        self.num_hit_blocks = 0
        self.num_published_blocks = 0
        self.blocks_are_sound = True
