"""A follower on a GPU: queues the passes of rank 0 on its own device."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.cache.kv_pool import KvPool
from worker_svc.gpu.device_inputs import BlockChanges, ForwardInputs
from worker_svc.gpu.device_pass import DevicePass, StepSizes, prepare_device_pass
from worker_svc.gpu.graphs import Capturer
from worker_svc.gpu.streams import Streams
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.ranks.follower import move_blocks
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.messages import Kind, Message, Messages
from worker_svc.runner.prompt_slices import slices_of
from worker_svc.runner.step_runner import no_op

_FORWARD = tuple(field.name for field in fields(ForwardInputs))
_BLOCKS = tuple(field.name for field in fields(BlockChanges))


@dataclass(frozen=True)
class DeviceFollower:
    """A rank's shard with its part of the cache and a block table. Input ids come from rank 0
    within a pass, so it needs no sampled tokens."""

    device_pass: DevicePass
    pool: KvPool
    group: RankGroup

    @torch.inference_mode()
    def run(self) -> None:
        """Follow until the message STOP. Anything that fails is a lost rank."""
        messages = Messages(self.group.broadcast)
        try:
            while (message := messages.receive()).kind != Kind.STOP:
                if message.kind == Kind.MOVES:
                    move_blocks(self.pool, message)
                else:
                    self._step(message)
        except Exception as error:
            self.group.lost(f"rank {self.group.rank} failed in a forward pass: {error}")
            raise

    def _step(self, message: Message) -> None:
        *arrays, logits_indices, prompt_indices, numbers = map(_long, message.arrays)
        num_tokens, graph_size, max_query_len, max_seq_len = numbers.tolist()
        of_forward = dict(zip(_FORWARD, arrays, strict=False))
        of_blocks = dict(zip(_BLOCKS, arrays[len(_FORWARD) :], strict=True))
        of_blocks["block_ids"] = of_blocks["block_ids"].astype(np.int32)
        self.pool.wait_for_swap_outs(of_forward["slot_mapping"])
        indices = {"logits_indices": logits_indices, "prompt_indices": prompt_indices}
        # Those of the pass are first, where graphs read them.
        tensors = self.device_pass.staging.send({**of_forward, **of_blocks, **indices})
        forward = self.device_pass.forward
        forward.change_blocks(BlockChanges(**{name: tensors[name] for name in of_blocks}))
        inputs = ForwardInputs(**{name: tensors[name] for name in of_forward})
        sampled, prompt = (tensors[name] for name in indices)
        if not num_tokens:
            return
        if graph_size:
            forward.replay(graph_size, len(sampled), sampled)
        elif not len(prompt):
            forward.launch(inputs, sampled, max_query_len, max_seq_len)
        else:
            final = forward.launch_states(inputs, max_query_len, max_seq_len)
            for part in slices_of(len(prompt), forward.model.vocab_size):
                final.logits(prompt[part])
            final.logits(sampled)


def follow_on_device(
    model: ServedModel,
    pool: KvPool,
    attention: PagedAttention,
    sizes: StepSizes,
    streams: Streams,
    capturer: Capturer | None,
    group: RankGroup,
) -> DeviceFollower:
    """A follower that is warmed up, as rank 0 is at the same time."""
    device_pass = prepare_device_pass(
        model, pool, attention, sizes, streams, capturer, group.share, no_op
    )
    return DeviceFollower(device_pass, pool, group)


def _long(words: NDArray[Any]) -> NDArray[Any]:
    return words.astype(np.int64)
