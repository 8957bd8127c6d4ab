"""A workload: requests of random tokens and their arrival times, drawn from a seed."""

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from quire.bench.lengths import Lengths
from quire.client.arguments import UINT32_MAX, check_integer

Arrival = Literal["poisson", "fixed"]
ARRIVALS: tuple[Arrival, ...] = get_args(Arrival)


@dataclass(frozen=True)
class BenchRequest:
    """A request. Its output has exactly `max_tokens` tokens if the server ignores EOS."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Distributions of requests; equal values give equal requests."""

    num_requests: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    # The ids from which prompts are drawn.
    token_ids: range
    # Longer prompts are truncated to leave room for one token, longer outputs to fit.
    max_model_len: int | None = None
    # Length of a common prefix that is added to all prompts.
    shared_prefix: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"num_requests: must be at least 1 (got {self.num_requests})")
        if len(self.token_ids) < 1 or self.token_ids.start < 0:
            raise ValueError(f"token_ids: must not be empty or negative (got {self.token_ids})")
        check_integer("shared_prefix", self.shared_prefix, UINT32_MAX)

    def requests(self) -> list[BenchRequest]:
        """Draw all prompts first, then all lengths of outputs."""
        rng = random.Random(self.seed)
        prefix = self._tokens(rng, self.shared_prefix)
        prompts = [
            self._truncate([*prefix, *self._tokens(rng, self.prompt_lengths.draw(rng))])
            for _ in range(self.num_requests)
        ]
        return [
            BenchRequest(prompt, self._max_tokens(prompt, self.output_lengths.draw(rng)))
            for prompt in prompts
        ]

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        ids = self.token_ids
        return [rng.randrange(ids.start, ids.stop) for _ in range(count)]

    def _truncate(self, prompt: list[int]) -> list[int]:
        return prompt if self.max_model_len is None else prompt[: self.max_model_len - 1]

    def _max_tokens(self, prompt: list[int], drawn: int) -> int:
        limit = self.max_model_len
        return drawn if limit is None else min(drawn, limit - len(prompt))


def parse_arrival(name: str) -> Arrival:
    """ValueError, with the name, for an unknown process."""
    for arrival in ARRIVALS:
        if arrival == name:
            return arrival
    raise ValueError(f"arrival: must be {' or '.join(ARRIVALS)} (got {name!r})")


def arrival_times(
    num_requests: int, rate_per_s: float, arrival: Arrival, seed: int = 0
) -> list[float]:
    """Ascending arrival times in seconds, the first at 0.

    The gaps have a mean of `1 / rate_per_s`; `poisson` draws them from an exponential distribution,
    `fixed` makes them equal. At an infinite rate all requests arrive at once. ValueError for a rate
    that is not above 0.
    """
    if math.isnan(rate_per_s) or rate_per_s <= 0:
        raise ValueError(f"request rate: must be above 0 (got {rate_per_s})")
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    # Independent of the requests' generator, so that the rate does not change the prompts.
    rng = random.Random(f"arrivals {seed}")
    draw = rng.expovariate if arrival == "poisson" else lambda rate: 1 / rate
    gaps = (draw(rate_per_s) for _ in range(num_requests - 1))
    return list(accumulate(gaps, initial=0.0))
