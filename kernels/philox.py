"""Philox4x32-10, the counter-based random generator of Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3" (SC 2011), on tensors.

A counter and a key give four words; there is no state. 32-bit words are stored as int64: the
product of two words wraps, and its 64 bits are exactly the high and the low word.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Counter = tuple[Tensor, Tensor, Tensor, Tensor]
Key = tuple[Tensor, Tensor]


def random_words(seeds: Tensor, positions: Tensor, num_words: int) -> Tensor:
    """int64 `[num_rows, num_words]`: word v is `v % 4` of the counter (v // 4, position, 0, 0).

    `seeds` and `positions` are int64 `[num_rows]`; the 64 bits of a seed are the key.
    """
    counters = torch.arange(-(-num_words // 4), device=seeds.device).unsqueeze(0)
    position = positions.unsqueeze(1)
    zero = torch.zeros_like(position)
    key = ((seeds & _WORD).unsqueeze(1), (seeds >> 32 & _WORD).unsqueeze(1))
    words = torch.stack(philox4x32((counters, position, zero, zero), key), dim=-1)
    return words.flatten(1)[:, :num_words]


def philox4x32(counter: Counter, key: Key) -> Counter:
    """Four words in [0, 2^32) per counter. Counters and keys are int64 words and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of the product."""
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD
