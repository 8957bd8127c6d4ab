"""The tokens that a simulated model samples, and the mixing function that they come from."""

import numpy as np
from numpy.typing import NDArray

from worker_svc.inputs import Ints

Words = NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(words: Words) -> Words:
    """The finaliser of SplitMix64, on arrays: every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))


def words_at(seeds: Words, positions: Ints) -> Words:
    """Output `position` of the generator SplitMix64 that starts at `seed`, of every pair."""
    steps = (positions + 1).astype(np.uint64)
    return mix(seeds + steps * np.uint64(_GOLDEN))


def tokens_at(seeds: Words, positions: Ints, vocab_size: int) -> Ints:
    """`token_at` of every pair."""
    return (words_at(seeds, positions) % np.uint64(vocab_size)).astype(np.int64)


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """The token at an absolute `position` of a sequence: output `position` of the generator
    SplitMix64 that starts at `seed`, modulo `vocab_size`.

    It depends on nothing else, so a sequence goes on alike wherever it is continued.
    """
    word = (seed + (position + 1) * _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return (word ^ (word >> 31)) % vocab_size
