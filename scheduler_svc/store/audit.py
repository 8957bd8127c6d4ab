"""Checks the conservation law of a pool: free + held = total blocks, always."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from scheduler_svc.store.errors import PoolFault
from scheduler_svc.store.packing import unpack_ids, unpack_u32s


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """A snapshot of all of a pool's blocks."""

    num_blocks: int  # the null block included
    step: int
    free_order: tuple[int, ...]  # front first, with blocks never used
    references: Mapping[int, int]  # of held blocks
    hashes: Mapping[int, bytes]  # of hashed blocks, held or free
    index: Mapping[bytes, tuple[int, ...]]  # blocks in order of publication
    next_indices: Mapping[int, int]  # the next journal index, by sequence id

    @property
    def num_free(self) -> int:
        return len(self.free_order)

    @property
    def num_held(self) -> int:
        return len(self.references)

    @classmethod
    def read(
        cls,
        state: Mapping[bytes, bytes],
        free: Sequence[bytes],
        references: bytes,
        hashes: Mapping[bytes, bytes],
        index: Mapping[bytes, bytes],
    ) -> Self:
        """Parse the values of the pool's keys. PoolFault if the pool does not exist."""
        if b"num_blocks" not in state:
            raise PoolFault("the pool does not exist")
        scores = [
            (_block(member), float(score))
            for member, score in zip(free[::2], free[1::2], strict=True)
        ]
        num_blocks, fresh = int(state[b"num_blocks"]), int(state[b"fresh"])
        counts = struct.unpack(f">{len(references) // 4}I", references)
        return cls(
            num_blocks=num_blocks,
            step=int(state[b"step"]),
            free_order=(
                *(block for block, score in scores if score < 0),
                *range(fresh, num_blocks),
                *(block for block, score in scores if score > 0),
            ),
            references={block: count for block, count in enumerate(counts) if count},
            hashes={_block(member): block_hash for member, block_hash in hashes.items()},
            index={block_hash: unpack_u32s(blocks) for block_hash, blocks in index.items()},
            next_indices=dict(
                zip(
                    unpack_ids(state[b"sequences"]),
                    unpack_u32s(state[b"next_indices"]),
                    strict=True,
                )
            ),
        )

    def check(self) -> None:
        """PoolFault if blocks are lost, duplicated or unknown, or if index and hashes disagree."""
        blocks = sorted([*self.free_order, *self.references])
        if blocks != list(range(1, self.num_blocks)):
            raise PoolFault(
                f"{self.num_free} free and {self.num_held} held blocks are not "
                f"the {self.num_blocks - 1} blocks of the pool"
            )
        entries = sorted((b, h) for h, entry in self.index.items() for b in entry)
        if entries != sorted(self.hashes.items()):
            raise PoolFault("the prefix index disagrees with the blocks' hashes")


def _block(packed: bytes) -> int:
    return int.from_bytes(packed, "little")
