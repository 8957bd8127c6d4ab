"""A follower's side of forward passes: does what rank 0 sends, until it says stop."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import PagedBatch
from worker_svc.cache.kv_pool import KvPool
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import BatchStates, ServedModel
from worker_svc.plan.plans import BlockMoves
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.messages import Kind, Message, Messages

_Words = NDArray[np.int32]


@dataclass
class Follower:
    """A rank's shard with its part of the cache."""

    model: ServedModel
    pool: KvPool
    attention: PagedAttention
    group: RankGroup
    # Of the last pass without a head.
    _final: BatchStates | None = field(default=None, init=False)

    @torch.inference_mode()
    def run(self) -> None:
        """Follow until the message STOP. RuntimeError if rank 0 is lost."""
        messages = Messages(self.group.broadcast)
        while (message := messages.receive()).kind != Kind.STOP:
            self._follow(message)

    def _follow(self, message: Message) -> None:
        if message.kind == Kind.MOVES:
            move_blocks(self.pool, message)
        elif message.kind == Kind.HEAD:
            assert self._final is not None
            self._final.logits(_long(message.arrays[0]))
        else:
            ids, positions, indices, *batch = message.arrays[:7]
            self._set_batch(*batch)
            if message.kind == Kind.LOGITS:
                self.model.logits(_long(ids), _long(positions), _long(indices))
            else:
                self._final = self.model.final_states(_long(ids), _long(positions))

    def _set_batch(
        self, slot_mapping: _Words, query_start_loc: _Words, seq_lens: _Words, table: _Words
    ) -> None:
        slots = slot_mapping.astype(np.int64)
        self.pool.wait_for_swap_outs(slots)
        batch = PagedBatch(
            block_table=torch.from_numpy(table.copy()),
            query_start_loc=_long(query_start_loc),
            seq_lens=_long(seq_lens),
            block_size=self.pool.block_size,
        )
        self.attention.set_batch(batch, torch.from_numpy(slots))


def move_blocks(pool: KvPool, message: Message) -> None:
    """Do what a message of the kind MOVES says."""
    ids = [array.astype(np.int64) for array in message.arrays[:6]]
    pairs = zip(ids[::2], ids[1::2], strict=True)
    pool.move(*(BlockMoves(*pair) for pair in pairs))


def _long(words: _Words) -> Tensor:
    return torch.from_numpy(words.astype(np.int64))
