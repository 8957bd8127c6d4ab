"""Hash chains of full blocks: equal hashes mean equal tokens from the first one on."""

from array import array
from hashlib import sha256

from scheduler_svc.store.packing import pack_u32s


def root_hash(model_fingerprint: bytes) -> bytes:
    """The parent of every first block's hash; keeps the KV of different models apart."""
    return sha256(model_fingerprint).digest()


def num_matchable_blocks(num_tokens: int, block_size: int) -> int:
    """Number of blocks that a match may cover: the last token is always computed for its logits."""
    return max(num_tokens - 1, 0) // block_size


class HashChain:
    """The hashes of one sequence's full blocks, each computed once as tokens arrive.

    A block's hash is SHA-256 over the parent's hash, the block's token ids as little-endian u32,
    and the salt, which keeps equal tokens of different salts apart.
    """

    def __init__(self, root: bytes, block_size: int, cache_salt: bytes = b"") -> None:
        self._root = root
        self._block_size = block_size
        self._cache_salt = cache_salt
        # One per full block, in order.
        self.hashes: list[bytes] = []

    def extend_to(self, token_ids: "array[int]") -> None:
        """Hash the blocks that have become full. `token_ids` are all tokens of the sequence; those
        of blocks that are hashed already are not read."""
        size, hashes, salt = self._block_size, self.hashes, self._cache_salt
        parent = hashes[-1] if hashes else self._root
        end = (len(hashes) + 1) * size
        while end <= len(token_ids):
            parent = sha256(parent + pack_u32s(token_ids[end - size : end]) + salt).digest()
            hashes.append(parent)
            end += size

    def fork(self, num_tokens: int) -> "HashChain":
        """The chain of another sequence whose first `num_tokens` tokens are the same."""
        fork = HashChain(self._root, self._block_size, self._cache_salt)
        fork.hashes = self.hashes[: num_tokens // self._block_size]
        return fork

    def truncate(self, num_tokens: int) -> None:
        """Drop the hashes of blocks that are not full with `num_tokens` tokens."""
        del self.hashes[num_tokens // self._block_size :]
