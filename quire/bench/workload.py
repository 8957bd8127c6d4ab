"""What is asked: requests of random tokens, drawn from a seed."""

import random
from dataclasses import dataclass

from quire.arguments import UINT32_MAX, check_integer
from quire.bench.lengths import Lengths


@dataclass(frozen=True)
class BenchRequest:
    """One request, which ends after exactly `max_tokens` where ends of sequence are ignored."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one kind; equal values give equal requests."""

    num_requests: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    # Prompts are drawn from these.
    token_ids: range
    # What is longer is cut: prompts leave room for a token, outputs end where the model does.
    max_model_len: int | None = None
    # Every prompt begins with the same so many tokens, beside those of its own.
    shared_prefix: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"num_requests: must be at least 1 (got {self.num_requests})")
        if len(self.token_ids) < 1 or self.token_ids.start < 0:
            raise ValueError(f"token_ids: there are none (got {self.token_ids})")
        check_integer("shared_prefix", self.shared_prefix, UINT32_MAX)

    def requests(self) -> list[BenchRequest]:
        """All prompts are drawn first, then all lengths of outputs."""
        rng = random.Random(self.seed)
        prefix = self._tokens(rng, self.shared_prefix)
        prompts = [
            self._cut([*prefix, *self._tokens(rng, self.prompt_lengths.draw(rng))])
            for _ in range(self.num_requests)
        ]
        return [
            BenchRequest(prompt, self._room(prompt, self.output_lengths.draw(rng)))
            for prompt in prompts
        ]

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        ids = self.token_ids
        return [rng.randrange(ids.start, ids.stop) for _ in range(count)]

    def _cut(self, prompt: list[int]) -> list[int]:
        return prompt if self.max_model_len is None else prompt[: self.max_model_len - 1]

    def _room(self, prompt: list[int], wanted: int) -> int:
        limit = self.max_model_len
        return wanted if limit is None else min(wanted, limit - len(prompt))
