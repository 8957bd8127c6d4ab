"""The part of a prompt that decides on its shard: its first tokens, more where many share them.

Pure. A key is the hash of a prefix. Prompts with the same key go to the same shard as far as its
load allows, and find each other's blocks there. The shortest prefix keeps most together, but one
that a large part of all requests begins with, such as a system prompt, would fill its shard. So a
*hot* prefix is divided by the tokens that follow it. The counts that this needs are those of the
last minute or so.
"""

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

# Tokens of the shortest prefix. Longer ones grow by as many, and later by an eighth.
STEP_TOKENS: Final = 32
MAX_TOKENS: Final = 4096
# A prefix is hot if its share of the requests is above this part of one shard's.
HOT_PART: Final = 0.5
# With fewer requests than these, a share has no meaning.
MIN_HOT_REQUESTS: Final = 8.0
# A longer prefix with at least this part of a shorter one's requests does not divide it.
SAME_PART: Final = 0.75
TIME_CONSTANT_S: Final = 60.0
MAX_PREFIXES: Final = 2**15

# Weights are divided by the growth of the newest one before they exceed a double.
_MAX_EXPONENT: Final = 100.0


def _depths() -> Iterator[int]:
    depth = STEP_TOKENS
    while depth <= MAX_TOKENS:
        yield depth
        depth += max(STEP_TOKENS, depth // 8 // STEP_TOKENS * STEP_TOKENS)


# Lengths of prefixes, in tokens.
DEPTHS: Final = tuple(_depths())


class PrefixKeys:
    """Counts the prefixes of the requests of one gateway, and chooses the key of each.

    The counts decay exponentially. They are kept with forward decay (Cormode et al., 2009): newer
    requests weigh more, and shares are those of decayed counts. Of a prompt that was not seen
    before only one more prefix is kept than was known of it, so that prompts that occur once take
    one entry, and frequent ones all.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        # Weights by key, the least recently used first.
        self._weights: OrderedDict[bytes, float] = OrderedDict()
        self._total = 0.0
        # When a request had the weight 1.
        self._unit_at_s: float | None = None

    def __len__(self) -> int:
        return len(self._weights)

    def choose(
        self, token_ids: Sequence[int], cache_salt: bytes, num_shards: int, now_s: float
    ) -> bytes:
        """Count a prompt and return its key. A shorter prompt than the shortest prefix is its own.

        The key is that of the shortest prefix that is not hot, or of the longest one that the
        prompt has; and then that of the shortest one with about the same requests, so that the key
        does not change when a prefix becomes hot that cannot be divided.
        """
        unit = self._unit(now_s)
        self._total += unit
        hot = max(HOT_PART / num_shards * self._total, MIN_HOT_REQUESTS * unit)
        key, weight, is_hot = b"", math.inf, True
        for prefix in _prefix_keys(token_ids, cache_salt):
            is_new = prefix not in self._weights
            longer_weight = self._count(prefix, unit)
            if is_hot:
                if longer_weight < SAME_PART * weight:
                    key = prefix
                weight, is_hot = longer_weight, longer_weight > hot
            if is_new:
                # Longer ones are neither known nor hot.
                break
        self._trim()
        return key

    def share(self, token_ids: Sequence[int], cache_salt: bytes = b"") -> float:
        """The share of the requests that begin with these tokens, of a length in `DEPTHS`."""
        *_, key = _prefix_keys(token_ids, cache_salt)
        return self._weights.get(key, 0.0) / self._total if self._total else 0.0

    def _unit(self, now_s: float) -> float:
        """The weight of a request now."""
        if self._unit_at_s is None:
            self._unit_at_s = now_s
        exponent = (now_s - self._unit_at_s) / TIME_CONSTANT_S
        if exponent > _MAX_EXPONENT:
            scale = math.exp(-exponent)
            self._total *= scale
            for key in self._weights:
                self._weights[key] *= scale
            self._unit_at_s, exponent = now_s, 0.0
        return math.exp(exponent)

    def _count(self, key: bytes, unit: float) -> float:
        weight = self._weights.pop(key, 0.0) + unit
        self._weights[key] = weight
        return weight

    def _trim(self) -> None:
        while len(self._weights) > self._max_prefixes:
            self._weights.popitem(last=False)


def _prefix_keys(token_ids: Sequence[int], cache_salt: bytes) -> Iterator[bytes]:
    """The hashes of the prompt's prefixes, shortest first; of the whole prompt if it has none."""
    digest = hashlib.blake2b(len(cache_salt).to_bytes(4, "little") + cache_salt, digest_size=16)
    if len(token_ids) < STEP_TOKENS:
        digest.update(array("I", token_ids).tobytes())
        yield digest.digest()
        return
    start = 0
    for depth in DEPTHS:
        if depth > len(token_ids):
            return
        digest.update(array("I", token_ids[start:depth]).tobytes())
        yield digest.copy().digest()
        start = depth
