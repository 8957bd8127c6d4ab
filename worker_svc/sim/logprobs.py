"""The log-probabilities that a simulated model gives with its tokens."""

import numpy as np

from worker_svc.inputs import Ints
from worker_svc.logprobs import Floats
from worker_svc.sim.tokens import Words, words_at

_MOST_LIKELY_RANKS = 4
_FRACTIONS = 1024


def logprobs_at(
    seeds: Words, positions: Ints, token_ids: Ints, num_top: int, vocab_size: int
) -> tuple[Ints, Floats, Ints]:
    """Token ids, log-probabilities and ranks, each `[num_tokens, 1 + num_top]`: of the chosen
    tokens, then of the `num_top` first ranks.

    Like the tokens, a function of (seed, position) alone. Word `position` of the generator that
    starts at the seed's complement says which of the first four ranks the chosen token has, and a
    fraction of 1024: rank r has the log-probability -(r + fraction), which float32 holds exactly,
    and tokens follow each other in the vocabulary by rank.
    """
    words = words_at(~seeds, positions)
    chosen = _column(words % np.uint64(min(_MOST_LIKELY_RANKS, vocab_size))) + 1
    fractions = _column(words >> np.uint64(32)) % _FRACTIONS / _FRACTIONS
    top = np.arange(1, min(num_top, vocab_size) + 1)
    ranks = np.concatenate([chosen, np.tile(top, (len(chosen), 1))], axis=1)
    ids = (token_ids[:, None] + ranks - chosen) % vocab_size
    return ids, -(ranks + fractions).astype(np.float32), ranks


def _column(words: Words) -> Ints:
    return words.astype(np.int64)[:, None]
