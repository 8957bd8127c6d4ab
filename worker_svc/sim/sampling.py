"""Tokens and log-probabilities of a simulated model, computed from SplitMix64."""

import numpy as np
from numpy.typing import NDArray

from worker_svc.plan.inputs import Ints
from worker_svc.plan.logprobs import Floats

Words = NDArray[np.uint64]

_MOST_LIKELY_RANKS = 4
_FRACTIONS = 1024


def mix(words: Words) -> Words:
    """The finaliser of SplitMix64: every input bit affects every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def words_at(seeds: Words, positions: Ints) -> Words:
    """Output `position` of the generator SplitMix64 seeded with `seed`, for every pair."""
    steps = (positions + 1).astype(np.uint64)
    return mix(seeds + steps * np.uint64(0x9E3779B97F4A7C15))


def tokens_at(seeds: Words, positions: Ints, vocab_size: int) -> Ints:
    """The token at an absolute position of a sequence: `words_at` modulo `vocab_size`.

    It depends on nothing else, so a sequence continues identically on any worker.
    """
    return (words_at(seeds, positions) % np.uint64(vocab_size)).astype(np.int64)


def logprobs_at(
    seeds: Words, positions: Ints, token_ids: Ints, num_top: int, vocab_size: int
) -> tuple[Ints, Floats, Ints]:
    """Token ids, log-probabilities and ranks, each `[num_tokens, 1 + num_top]`: of the sampled
    tokens, then of the `num_top` first ranks.

    Like the tokens, a function of (seed, position) alone. Word `position` of the generator seeded
    with the seed's complement gives the rank of the sampled token, one of the first four, and a
    fraction of 1024. Rank r has the log-probability -(r + fraction), which float32 holds exactly.
    Tokens of consecutive ranks have consecutive ids.
    """
    words = words_at(~seeds, positions)
    sampled = _column(words % np.uint64(min(_MOST_LIKELY_RANKS, vocab_size))) + 1
    fractions = _column(words >> np.uint64(32)) % _FRACTIONS / _FRACTIONS
    top = np.arange(1, min(num_top, vocab_size) + 1)
    ranks = np.concatenate([sampled, np.tile(top, (len(sampled), 1))], axis=1)
    ids = (token_ids[:, None] + ranks - sampled) % vocab_size
    return ids, -(ranks + fractions).astype(np.float32), ranks


def _column(words: Words) -> Ints:
    return words.astype(np.int64)[:, None]
