"""Hash chains of full blocks: equal hashes mean equal tokens from the first one on."""

import struct
from collections.abc import Iterable
from hashlib import sha256


def root_hash(model_fingerprint: bytes) -> bytes:
    """The parent of every first block's hash: KV of one model never meets another's."""
    return sha256(model_fingerprint).digest()


def extra_keys(cache_salt: bytes = b"", adapter: bytes = b"") -> bytes:
    """What keeps equal tokens apart, each key behind its length so that none runs into the next."""
    if not cache_salt and not adapter:
        return b""
    return b"".join(struct.pack("<I", len(key)) + key for key in (cache_salt, adapter))


def num_matchable_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that a match may cover: the last token's logits must be computed."""
    return max(num_tokens - 1, 0) // block_size


class HashChain:
    """The hashes of one sequence's full blocks, each computed once as tokens arrive.

    A block's hash is SHA-256 over the parent's hash, the block's token ids as little-endian u32,
    and the extra keys.
    """

    def __init__(self, root: bytes, block_size: int, extra: bytes = b"") -> None:
        self._parent = root
        self._block_size = block_size
        self._extra = extra
        self._open: list[int] = []
        self._hashes: list[bytes] = []

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """One per full block, in order."""
        return tuple(self._hashes)

    @property
    def num_tokens(self) -> int:
        return len(self._hashes) * self._block_size + len(self._open)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds the tokens that follow those already there."""
        self._open.extend(token_ids)
        size = self._block_size
        full = len(self._open) // size * size
        for start in range(0, full, size):
            self._close(self._open[start : start + size])
        del self._open[:full]

    def _close(self, block: list[int]) -> None:
        tokens = struct.pack(f"<{len(block)}I", *block)
        self._parent = sha256(self._parent + tokens + self._extra).digest()
        self._hashes.append(self._parent)
