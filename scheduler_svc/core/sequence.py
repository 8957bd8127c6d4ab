"""A sequence: one token list on its way from a prompt to its end."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from quire.service.errors import RequestError
from scheduler_svc.store.hashing import HashChain


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
    stop_token_ids: frozenset[int]


class Subscriber(Protocol):
    """Who hears of a request: its gateway's stream."""

    def deliver(self, sequence: "Sequence", first_index: int, token_ids: list[int]) -> None: ...

    def ended(self, sequence: "Sequence", end: End) -> None: ...

    def failed(self, sequence: "Sequence", error: RequestError) -> None: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One token list, its hash chain, and its place on a lane while it has one.

    `token_ids`:  [0, num_prompt_tokens) prompt   [.., end) sampled, known
    cache:        [0, num_computed_tokens) written, or written by the plan in flight
    output:       [0, num_folded) in its record   [.., num_journaled) in the journal, delivered
                  [.., end) waiting for the next commit
    """

    sequence_id: int
    principal: str
    request_id: str
    params: Params
    token_ids: list[int]
    num_prompt_tokens: int
    subscriber: Subscriber
    attachment: int
    cache_salt: bytes = b""
    choice: int = 0

    # Set when the model is known, before the sequence is first considered.
    chain: HashChain | None = None
    max_num_tokens: int = 0

    row: int | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_hit_blocks: int = 0
    num_cached_tokens: int = 0
    num_published_blocks: int = 0
    blocks_are_sound: bool = True

    num_journaled: int = 0
    num_folded: int = 0
    end: End | None = None
    error: RequestError | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that the cache held at its admission."""
        return min(self.num_cached_tokens, self.num_prompt_tokens)

    @property
    def is_computed(self) -> bool:
        """Every known token is in the cache: the step that did it samples the next one."""
        return self.num_computed_tokens == len(self.token_ids)

    @property
    def leaving(self) -> bool:
        """It gives its row back in the lane's next plan."""
        return self.end is not None or self.error is not None

    @property
    def unjournaled(self) -> list[int]:
        """Output that Redis does not have yet; what lies behind a cut is never journaled."""
        if self.error is not None or (self.end and self.end.reason is EndReason.STOP_STRING):
            return []
        return self.token_ids[self.num_prompt_tokens + self.num_journaled :]

    @property
    def withdrawn_blocks(self) -> list[int]:
        """Blocks whose hashes a failed row takes back: those it published itself."""
        if self.blocks_are_sound:
            return []
        return self.block_ids[self.num_hit_blocks : self.num_published_blocks]

    def hashes(self) -> tuple[bytes, ...]:
        """Hashes of its full blocks of known tokens, first to last."""
        assert self.chain is not None
        self.chain.extend(self.token_ids[self.chain.num_tokens :])
        return self.chain.hashes

    def limit(self, max_model_len: int) -> None:
        """Fixes the length at which the sequence ends at the latest."""
        self.max_num_tokens = min(self.num_prompt_tokens + self.params.max_tokens, max_model_len)

    def take(self, token_id: int) -> None:
        """Appends a sampled token and ends the sequence where it is the last one."""
        self.token_ids.append(token_id)
        if token_id in self.params.stop_token_ids:
            self.end = End(EndReason.STOP_TOKEN, self.num_output_tokens, token_id)
        elif len(self.token_ids) >= self.max_num_tokens:
            self.end = End(EndReason.LENGTH, self.num_output_tokens)

    def finish(self, num_output_tokens: int) -> None:
        """Ends the sequence where the gateway found a stop string; the first end wins."""
        if not self.leaving:
            self.end = End(EndReason.STOP_STRING, min(num_output_tokens, self.num_output_tokens))

    def fail(self, error: RequestError) -> None:
        """Ends the sequence with an error; the first end wins."""
        if not self.leaving:
            self.error = error

    def lose(self, error: RequestError) -> None:
        """Ends the sequence with an error although it may have ended: its last tokens are gone."""
        if self.unjournaled:
            self.end = None
        self.fail(error)
