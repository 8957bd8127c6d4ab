"""One step's inputs as a device gets them: the arrays that travel, and the tensors they become.

All of them lie in one buffer. What the forward pass reads comes first, so that its place depends
on the numbers of tokens and rows alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import RowParams
from worker_svc.inputs import Ints, StepInputs
from worker_svc.plans import Admission, BlockAppend, Plan
from worker_svc.tables import Tables

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class PassInputs:
    """What the forward pass reads."""

    input_ids: Tensor  # int64 [num_tokens]; TOKEN_ON_DEVICE where the host does not know it
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]
    query_start_loc: Tensor  # int64 [num_rows + 1]
    seq_lens: Tensor  # int64 [num_rows]
    rows: Tensor  # int64 [num_rows], of the device's tables


@dataclass(frozen=True)
class SamplingInputs:
    """What the sampler reads."""

    logits_indices: Tensor  # int64 [num_sampling], the tokens that are sampled from
    sampling_rows: Tensor  # int64 [num_sampling]
    top_ks: Tensor
    seeds: Tensor
    sample_positions: Tensor
    temperatures: Tensor
    top_ps: Tensor
    min_ps: Tensor
    asking: Tensor  # int64, which of the sampling rows want log-probabilities

    @property
    def params(self) -> RowParams:
        return RowParams(
            temperatures=self.temperatures,
            top_ks=self.top_ks,
            top_ps=self.top_ps,
            min_ps=self.min_ps,
            seeds=self.seeds,
            positions=self.sample_positions,
        )


@dataclass(frozen=True)
class BlockChanges:
    """What is new in the block table."""

    table_indices: Tensor  # int64, into the flat block table
    block_ids: Tensor  # int32


def pass_arrays(rows: Ints, inputs: StepInputs, spare_row: int, num_padding: int) -> Arrays:
    """Of `PassInputs`, with so many requests more: each has one token, slot -1 and length 0, and
    stands in the spare row, whose block table is zeros."""
    num_tokens = inputs.num_tokens
    return {
        "input_ids": _padded(inputs.input_ids, 0, num_padding),
        "positions": _padded(inputs.positions, 0, num_padding),
        "slot_mapping": _padded(inputs.slot_mapping, -1, num_padding),
        "query_start_loc": np.concatenate(
            [inputs.query_start_loc, np.arange(num_tokens + 1, num_tokens + 1 + num_padding)]
        ),
        "seq_lens": _padded(inputs.seq_lens, 0, num_padding),
        "rows": _padded(rows, spare_row, num_padding),
    }


def padding_arrays(spare_row: int, num_rows: int) -> Arrays:
    """Of `PassInputs`: nothing but padding."""
    return {
        "input_ids": np.zeros(num_rows, np.int64),
        "positions": np.zeros(num_rows, np.int64),
        "slot_mapping": np.full(num_rows, -1),
        "query_start_loc": np.arange(num_rows + 1),
        "seq_lens": np.zeros(num_rows, np.int64),
        "rows": np.full(num_rows, spare_row),
    }


def sampling_arrays(rows: Ints, inputs: StepInputs, tables: Tables) -> Arrays:
    """Of `SamplingInputs`."""
    sampling = rows[inputs.sampling]
    return {
        "logits_indices": inputs.logits_indices,
        "sampling_rows": sampling,
        "top_ks": tables.top_ks[sampling],
        "seeds": tables.seeds[sampling].view(np.int64),
        "sample_positions": tables.num_tokens[sampling],
        "temperatures": tables.temperatures[sampling],
        "top_ps": tables.top_ps[sampling],
        "min_ps": tables.min_ps[sampling],
        "asking": tables.num_logprobs[sampling].nonzero()[0],
    }


def block_arrays(plan: Plan, tables: Tables) -> Arrays:
    """Of `BlockChanges`, when the plan has been applied."""
    counts: dict[int, int] = {}
    changes: tuple[Admission | BlockAppend, ...] = (*plan.admissions, *plan.appends)
    for change in changes:
        counts[change.row] = counts.get(change.row, 0) + len(change.block_ids)
    width = tables.block_table.shape[1]
    ends = [row * width + int(tables.num_blocks[row]) for row in counts]
    pieces = [np.arange(end - n, end) for end, n in zip(ends, counts.values(), strict=True)]
    indices = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    return {"table_indices": indices, "block_ids": tables.block_table.reshape(-1)[indices]}


def _padded(values: Ints, value: int, count: int) -> Ints:
    return np.concatenate([values, np.full(count, value)]) if count else values
