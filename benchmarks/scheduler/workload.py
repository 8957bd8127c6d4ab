"""Requests generated from a few parameters and a seed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_VOCABULARY = 32000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Parameters of the requests. Pairs are limits of a uniform distribution."""

    num_requests: int
    concurrency: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    # Every prompt begins with one of these, chosen with a probability proportional to 1 / rank.
    num_prefixes: int = 0
    prefix_tokens: int = 0
    seed: int = 1


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int


def requests(workload: Workload) -> Iterator[Request]:
    random = np.random.default_rng(workload.seed)
    prefixes = random.integers(
        0, _VOCABULARY, (workload.num_prefixes, workload.prefix_tokens)
    ).tolist()
    shares = 1 / np.arange(1, workload.num_prefixes + 1)
    shares /= shares.sum()
    for _ in range(workload.num_requests):
        prefix = prefixes[random.choice(len(prefixes), p=shares)] if prefixes else []
        own = random.integers(0, _VOCABULARY, _drawn(random, workload.prompt_tokens)).tolist()
        yield Request(prefix + own, _drawn(random, workload.output_tokens))


def _drawn(random: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(random.integers(bounds[0], bounds[1], endpoint=True))
