"""Prepares the forward pass on a GPU: kernels are compiled, libraries allocate their memory, and
CUDA graphs are captured. Warm-up writes no slot and reads only the null block.

The ranks of a worker do the same in the same order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.gpu.linear_launch import ROW_TILES
from worker_svc.cache.kv_pool import KvPool
from worker_svc.gpu.device_forward import DeviceForward
from worker_svc.gpu.device_inputs import Arrays, ForwardInputs
from worker_svc.gpu.graphs import Capturer, graph_sizes
from worker_svc.gpu.staging import Staging, largest_step_bytes
from worker_svc.gpu.streams import Streams
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel

# A length at which attention splits the keys of each sequence.
_LONG: Final = 1024


@dataclass(frozen=True)
class StepSizes:
    """The largest step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    @property
    def num_bytes(self) -> int:
        """Of its inputs."""
        max_blocks = -(-self.max_model_len // self.block_size)
        return largest_step_bytes(self.max_num_seqs, self.max_num_batched_tokens, max_blocks)


@dataclass(frozen=True)
class DevicePass:
    """A forward pass and where its inputs are staged."""

    forward: DeviceForward
    staging: Staging


@torch.inference_mode()
def prepare_device_pass(
    model: ServedModel,
    pool: KvPool,
    attention: PagedAttention,
    sizes: StepSizes,
    streams: Streams,
    capturer: Capturer | None,
    share_ids: Callable[[Tensor], object],
    use_logits: Callable[[Tensor], object],
) -> DevicePass:
    """A pass that is warmed up; without a capturer there are no graphs. `share_ids` is called with
    the input ids in each pass, `use_logits` with the logits of a batch after each warm-up."""
    device_forward = DeviceForward(
        model, attention, pool.block_size, sizes.max_num_seqs, sizes.max_model_len, share_ids
    )
    staging = Staging(sizes.num_bytes, model.device, streams)
    use_logits(_warm_up(device_forward, staging, sizes))
    pool.warm_up()
    if capturer is not None:
        device_forward.capture(graph_sizes(sizes.max_num_seqs), staging, capturer)
        # Capturing returns free memory to the driver. This run allocates it again, so too little
        # memory for the largest batch beside the graphs shows now.
        use_logits(_warm_up(device_forward, staging, sizes))
    streams.synchronize()
    return DevicePass(device_forward, staging)


def _warm_up(device_forward: DeviceForward, staging: Staging, sizes: StepSizes) -> Tensor:
    """Run passes of all kinds; return the logits of the last one."""
    for query_lens, seq_lens in _batches(sizes):
        tensors = staging.send(dummy_batch(query_lens, seq_lens, device_forward.padding_row))
        inputs = ForwardInputs(**tensors)
        sampled = inputs.query_start_loc[1:] - 1
        if sum(query_lens) <= ROW_TILES[-1]:
            # As of prompts whose log-probabilities are wanted.
            sampled = torch.arange(sum(query_lens), device=device_forward.model.device)
        logits = device_forward.launch(inputs, sampled, max(query_lens), max(seq_lens))
    return logits


def dummy_batch(query_lens: list[int], seq_lens: list[int], padding_row: int) -> Arrays:
    """`ForwardInputs` of queries at the ends of sequences that consist of the null block."""
    ends = zip(query_lens, seq_lens, strict=True)
    return {
        "input_ids": np.zeros(sum(query_lens), np.int64),
        "positions": np.concatenate([np.arange(seq - query, seq) for query, seq in ends]),
        "slot_mapping": np.full(sum(query_lens), -1),
        "query_start_loc": np.cumsum([0, *query_lens]),
        "seq_lens": np.array(seq_lens),
        "rows": np.full(len(query_lens), padding_row),
    }


def _batches(sizes: StepSizes) -> Iterator[tuple[list[int], list[int]]]:
    """Lengths of queries and sequences: batches of prompts, the largest first, then decode batches,
    small and large, short and long. Products with few, some and many rows have kernels of their
    own: those of layers by the number of tokens, those of the head by that of rows of logits."""
    longest, most_rows = sizes.max_model_len, sizes.max_num_seqs
    most_tokens = sizes.max_num_batched_tokens
    for num_tokens in (most_tokens, *(size for size in ROW_TILES if size < most_tokens)):
        whole, rest = divmod(num_tokens, longest)
        prompts = [longest] * whole + [rest] * bool(rest)
        yield prompts[:most_rows], prompts[:most_rows]
    num_rows = min(most_rows, most_tokens)
    for seq_lens in ([1], [longest], [1] * num_rows, [min(longest, _LONG)] * num_rows):
        yield [1] * len(seq_lens), seq_lens
