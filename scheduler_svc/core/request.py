"""Values of a request: parameters, how its sequences end, and what is delivered."""

import hashlib
import struct
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Final

from quire.service.beams import num_entries
from scheduler_svc.beams.search import EarlyStopping

# Tokens of a choice in a frame with deferred delivery, after its first one: the client of the
# request reads none before the end, and its text does not end it.
DEFERRED_TOKENS: Final = 32


class EndReason(Enum):
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    # Found by the gateway in the text: a stop string, or that the only call of a tool is complete.
    STOP_STRING = "stop_string"


@dataclass(frozen=True, slots=True)
class End:
    """The end of a sequence without an error."""

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
    # Entries per sampled token: 0 for none, k + 1 for the token itself and the top k.
    num_logprobs: int = 0
    # The same for prompt tokens.
    num_prompt_logprobs: int = 0
    min_p: float = 0.0
    # Only the worker reads it; empty: nothing changes the logits.
    logits_params: bytes = b""
    # Tokens that a step may add to the one that it samples.
    num_lookahead_tokens: int = 0
    # The worker proposes no draft tokens.
    without_drafts: bool = False
    # Beam search with so many beams; 0: none.
    beam_width: int = 0
    length_penalty: float = 0.0
    early_stopping: int = EarlyStopping.HEURISTIC

    @property
    def num_jump_tokens(self) -> int:
        """The look-ahead on a worker that does not speculate. A row with log-probabilities does not
        jump: that has no logits. With look-ahead it can wait for its grammar."""
        most = self.num_lookahead_tokens
        return min(most, 1) if self.num_logprobs else most

    @property
    def num_journaled_logprobs(self) -> int:
        """Entries per token in the journal. A search has its steps in their place."""
        return num_entries(self.beam_width) if self.beam_width else self.num_logprobs

    def lookahead_with(self, num_drafts: int) -> int:
        """The look-ahead on a worker that needs `num_drafts` of it for drafts."""
        return max(0 if self.without_drafts else num_drafts, self.num_jump_tokens)


@dataclass(slots=True)
class Delivery:
    """New tokens for one subscriber, all of them journaled; one entry per sequence."""

    attachments: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    # Index of the first token within the sequence's output.
    first_indices: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # concatenated
    # Packed, a string per entry, empty where not requested.
    logprobs: list[bytes] = field(default_factory=list)
    # Of prompts, as above, but with the first token of choice 0; no strings if no entry has any.
    prompt_logprobs: list[bytes] = field(default_factory=list)

    def add(
        self,
        attachment: int,
        choice: int,
        first: int,
        token_ids: list[int],
        logprobs: bytes,
        prompt_logprobs: bytes = b"",
    ) -> None:
        """Add an entry: a choice's tokens from the index `first` on."""
        if prompt_logprobs or self.prompt_logprobs:
            missing = len(self.attachments) - len(self.prompt_logprobs)
            self.prompt_logprobs += [b""] * missing
            self.prompt_logprobs.append(prompt_logprobs)
        self.attachments.append(attachment)
        self.choices.append(choice)
        self.first_indices.append(first)
        self.num_tokens.append(len(token_ids))
        self.token_ids += token_ids
        self.logprobs.append(logprobs)

    def part(self, places: list[int]) -> "Delivery":
        """The entries at these places."""
        ends = list(accumulate(self.num_tokens))
        part = Delivery()
        for at in places:
            part.add(
                self.attachments[at],
                self.choices[at],
                self.first_indices[at],
                self.token_ids[ends[at] - self.num_tokens[at] : ends[at]],
                self.logprobs[at] if self.logprobs else b"",
                self.prompt_logprobs[at] if self.prompt_logprobs else b"",
            )
        return part


class SequenceIds:
    """The sequence ids of one term, unique across terms."""

    def __init__(self, epoch: int) -> None:
        # An epoch is at least the clock in ms, so 4 million ids fit per ms.
        self._next = epoch << 22

    def take(self, count: int) -> int:
        """The first of so many new ids, which are consecutive."""
        first = self._next
        self._next += count
        return first


def seed_of_choice(seed: int, choice: int) -> int:
    """Seed of one choice: the request's own for choice 0, hashed from it for the rest."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(struct.pack("<QI", seed, choice)).digest()
    return int.from_bytes(digest[:8], "little")
