"""What a device does before its first step: kernels are compiled, libraries take their memory, and
passes over decoding rows are recorded.

Nothing of it can be told from later: no slot is written, and what is read is the null block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.choice import Implementation
from kernels.sampling import RowParams, sample, token_logprobs
from worker_svc.device_inputs import Arrays, PassInputs
from worker_svc.device_pass import DevicePass
from worker_svc.graphs import Capturer, graph_sizes
from worker_svc.kv_pool import KvPool
from worker_svc.logprobs import MAX_NUM_LOGPROBS
from worker_svc.staging import Staging
from worker_svc.streams import Streams

# Of many sequences at once, whose keys take several parts each.
_LONG: Final = 1024
# Temperature, top_k, top_p: all the ways to choose a token.
_WAYS: Final = ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 20, 1.0), (1.0, 0, 0.9), (1.0, 20, 0.9))


@dataclass(frozen=True)
class Limits:
    """Of what one step may be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@torch.inference_mode()
def warm_up(
    device_pass: DevicePass,
    pool: KvPool,
    staging: Staging,
    streams: Streams,
    limits: Limits,
    implementation: Implementation | None,
    capturer: Capturer | None,
) -> None:
    """Returns when steps may come. Without a capturer every step is launched anew."""
    _run(device_pass, staging, streams, limits, implementation)
    pool.warm_up()
    if capturer is not None:
        device_pass.record(graph_sizes(limits.max_num_seqs), staging, capturer)
        # Recording gives the driver back what was free. It is taken again here, where it shows if
        # there is too little for the largest batch beside what was recorded.
        _run(device_pass, staging, streams, limits, implementation)
    streams.synchronize()


def _run(
    device_pass: DevicePass,
    staging: Staging,
    streams: Streams,
    limits: Limits,
    implementation: Implementation | None,
) -> None:
    """Steps of all kinds, to their results on the host."""
    for query_lens, seq_lens in _batches(limits):
        tensors = staging.send(unwritten_batch(query_lens, seq_lens, device_pass.spare_row))
        inputs = PassInputs(**tensors)
        logits = device_pass.launch(
            inputs, inputs.query_start_loc[1:] - 1, max(query_lens), max(seq_lens)
        )
    # The null block may hold anything, logits that are no numbers among them.
    streams.fetch(_sample(torch.randn_like(logits), implementation))


def unwritten_batch(query_lens: list[int], seq_lens: list[int], spare_row: int) -> Arrays:
    """Of `PassInputs`: queries at the ends of sequences that consist of the null block."""
    ends = zip(query_lens, seq_lens, strict=True)
    return {
        "input_ids": np.zeros(sum(query_lens), np.int64),
        "positions": np.concatenate([np.arange(seq - query, seq) for query, seq in ends]),
        "slot_mapping": np.full(sum(query_lens), -1),
        "query_start_loc": np.cumsum([0, *query_lens]),
        "seq_lens": np.array(seq_lens),
        "rows": np.full(len(query_lens), spare_row),
    }


def _batches(limits: Limits) -> Iterator[tuple[list[int], list[int]]]:
    """Lengths of queries and sequences: a full batch of prompts, and decoding rows, few and many,
    short and long."""
    longest, most_rows = limits.max_model_len, limits.max_num_seqs
    whole, rest = divmod(limits.max_num_batched_tokens, longest)
    prompts = [longest] * whole + [rest] * bool(rest)
    yield prompts[:most_rows], prompts[:most_rows]
    num_rows = min(most_rows, limits.max_num_batched_tokens)
    for seq_lens in ([1], [longest], [1] * num_rows, [min(longest, _LONG)] * num_rows):
        yield [1] * len(seq_lens), seq_lens


def _sample(logits: Tensor, implementation: Implementation | None) -> Sequence[Tensor]:
    """By every way, one after the other, with log-probabilities and without."""
    num_rows, device = len(logits), logits.device
    for temperature, top_k, top_p in _WAYS:
        params = RowParams(
            temperatures=torch.full((num_rows,), temperature, device=device),
            top_ks=torch.full((num_rows,), top_k, device=device),
            top_ps=torch.full((num_rows,), top_p, device=device),
            min_ps=torch.zeros(num_rows, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        tokens = sample(logits, params, implementation=implementation)
    num_top = min(MAX_NUM_LOGPROBS - 1, logits.shape[1])
    entries = token_logprobs(logits, tokens, num_top, implementation=implementation)
    return [tokens, entries.token_ids, entries.logprobs, entries.ranks]
