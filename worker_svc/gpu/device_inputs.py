"""One step's inputs as host arrays, and as the device tensors that they are copied to.

All of them are in one buffer. The inputs of the forward pass come first, so their addresses depend
only on the numbers of tokens and rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import SamplingTensors
from worker_svc.plan.inputs import Ints, StepInputs
from worker_svc.plan.plans import Plan
from worker_svc.plan.prompt_logprobs import PromptTargets
from worker_svc.plan.tables import RowTables

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of the forward pass."""

    input_ids: Tensor  # int64 [num_tokens]; PLACEHOLDER_TOKEN if not on the host yet
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]
    query_start_loc: Tensor  # int64 [num_rows + 1]
    seq_lens: Tensor  # int64 [num_rows]
    rows: Tensor  # int64 [num_rows], in the device's tables


@dataclass(frozen=True)
class SamplingInputs:
    """Inputs of the sampler."""

    logits_indices: Tensor  # int64 [num_sampling], into the tokens of the batch
    sampling_rows: Tensor  # int64 [num_sampling]
    top_ks: Tensor
    seeds: Tensor
    sample_positions: Tensor
    temperatures: Tensor
    top_ps: Tensor
    min_ps: Tensor
    logprob_indices: Tensor  # int64, the sampling rows that request log-probabilities
    # Those of them whose log-probabilities are of the changed logits: int64, into `logprob_indices`
    # and into the sampling rows.
    processed_indices: Tensor
    processed_lines: Tensor

    @property
    def params(self) -> SamplingTensors:
        return SamplingTensors(
            temperatures=self.temperatures,
            top_ks=self.top_ks,
            top_ps=self.top_ps,
            min_ps=self.min_ps,
            seeds=self.seeds,
            positions=self.sample_positions,
        )


@dataclass(frozen=True)
class BlockChanges:
    """Changed entries of the block table."""

    table_indices: Tensor  # int64, into the flat block table
    block_ids: Tensor  # int32


def forward_arrays(rows: Ints, inputs: StepInputs, padding_row: int, num_padding: int) -> Arrays:
    """The arrays of `ForwardInputs`, with `num_padding` rows more. Each of these has one token,
    slot -1 and length 0, in the padding row, whose block table is zeros."""
    num_tokens = inputs.num_tokens
    return {
        "input_ids": _padded(inputs.input_ids, 0, num_padding),
        "positions": _padded(inputs.positions, 0, num_padding),
        "slot_mapping": _padded(inputs.slot_mapping, -1, num_padding),
        "query_start_loc": np.concatenate(
            [inputs.query_start_loc, np.arange(num_tokens + 1, num_tokens + 1 + num_padding)]
        ),
        "seq_lens": _padded(inputs.seq_lens, 0, num_padding),
        "rows": _padded(rows, padding_row, num_padding),
    }


def padding_arrays(padding_row: int, num_rows: int) -> Arrays:
    """The arrays of `ForwardInputs` for a batch that is all padding."""
    return {
        "input_ids": np.zeros(num_rows, np.int64),
        "positions": np.zeros(num_rows, np.int64),
        "slot_mapping": np.full(num_rows, -1),
        "query_start_loc": np.arange(num_rows + 1),
        "seq_lens": np.zeros(num_rows, np.int64),
        "rows": np.full(num_rows, padding_row),
    }


def sampling_arrays(rows: Ints, inputs: StepInputs, tables: RowTables) -> Arrays:
    """The arrays of `SamplingInputs`."""
    sampling = rows[inputs.sampling_mask]
    asked = tables.num_logprobs[sampling].nonzero()[0]
    processed = tables.processed_logprobs[sampling[asked]].nonzero()[0]
    return {
        "logits_indices": inputs.logits_indices,
        "sampling_rows": sampling,
        "top_ks": tables.top_ks[sampling],
        "seeds": tables.seeds[sampling].view(np.int64),
        "sample_positions": tables.num_tokens[sampling],
        "temperatures": tables.temperatures[sampling],
        "top_ps": tables.top_ps[sampling],
        "min_ps": tables.min_ps[sampling],
        "logprob_indices": asked,
        "processed_indices": processed,
        "processed_lines": asked[processed],
    }


@dataclass(frozen=True)
class PromptInputs:
    """The prompt tokens whose log-probabilities are computed."""

    prompt_logits_indices: Tensor  # int64, into the tokens of the batch
    prompt_token_ids: Tensor  # int64


def prompt_arrays(targets: PromptTargets | None) -> Arrays:
    """The arrays of `PromptInputs`; none without targets."""
    if targets is None:
        return {}
    return {
        "prompt_logits_indices": targets.logits_indices,
        "prompt_token_ids": targets.token_ids,
    }


def block_arrays(plan: Plan, tables: RowTables) -> Arrays:
    """The arrays of `BlockChanges`, after the plan was applied to the tables."""
    counts = np.zeros(tables.max_num_seqs, np.int64)
    for admission in plan.admissions:
        counts[admission.row] = len(admission.block_ids)
    counts[plan.appends.rows] += plan.appends.num_blocks
    rows = counts.nonzero()[0]
    counts = counts[rows]
    ends = rows * tables.block_table.shape[1] + tables.num_blocks[rows]
    indices = np.repeat(ends - counts.cumsum(), counts) + np.arange(counts.sum())
    return {"table_indices": indices, "block_ids": tables.block_table.reshape(-1)[indices]}


def _padded(values: Ints, value: int, count: int) -> Ints:
    return np.concatenate([values, np.full(count, value)]) if count else values
