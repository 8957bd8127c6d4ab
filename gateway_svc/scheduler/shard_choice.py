"""Chooses the shard of a new request: consistent hashing with bounded loads. Pure.

The order of the shards for a key is that of rendezvous hashing (Thaler and Ravishankar, 1998): a
new shard takes its part of the keys from all others, and no other key moves. The bound is that of
Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018).
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

# A shard with a higher multiple of the mean load takes no request that another one can take.
BOUND = 1.25
# Sequences per worker below which a shard takes any request: a step of so few rows takes about as
# long as one of a single row, and the number of sequences varies too much to follow it.
LIGHT_LOAD = 4

# One digest has the scores of so many shards.
_SCORES = struct.Struct("<8Q")
_NUM_SCORES = 8


@dataclass(frozen=True, slots=True)
class ShardLoad:
    # Workers that take requests; 0 also if its leader is not connected.
    num_workers: int
    # Sequences of live requests.
    num_live: int

    @property
    def is_usable(self) -> bool:
        return self.num_workers > 0


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """The shards that a request may be given to, in the order in which they are tried."""

    shards: tuple[int, ...]
    # The first is not the key's own, because that one has too much load.
    is_spilled: bool


def rendezvous_order(key: bytes, num_shards: int) -> list[int]:
    """All shards by descending score; the score depends on the key and the shard alone.

    `key` has at most 64 bytes."""
    scores: list[int] = []
    for block in range(-(-num_shards // _NUM_SCORES)):
        digest = hashlib.blake2b(key=key, salt=block.to_bytes(16, "little")).digest()
        scores += _SCORES.unpack(digest)
    return sorted(range(num_shards), key=scores.__getitem__, reverse=True)


def choose(order: Sequence[int], loads: Sequence[ShardLoad]) -> ShardOrder:
    """Move the first shard of a key's order whose load is within the bound to the front.

    The load is the number of live sequences per worker. One below `LIGHT_LOAD` is always within the
    bound. Shards that are not usable are left out, unless all are.
    """
    usable = [shard for shard in order if loads[shard].is_usable]
    if not usable:
        return ShardOrder(tuple(order), is_spilled=False)
    num_live = sum(loads[shard].num_live for shard in usable)
    num_workers = sum(loads[shard].num_workers for shard in usable)
    limit = max(BOUND * num_live / num_workers, LIGHT_LOAD)
    # One of them has at most the mean load.
    first = next(
        shard for shard in usable if loads[shard].num_live <= limit * loads[shard].num_workers
    )
    others = (shard for shard in usable if shard != first)
    return ShardOrder((first, *others), is_spilled=first != usable[0])
