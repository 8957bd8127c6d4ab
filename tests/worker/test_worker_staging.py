"""One copy per step, from buffers that are not written while they are copied."""

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from host_device import HostStreams
from torch import Tensor

from worker_svc.gpu.device_inputs import (
    BlockChanges,
    ForwardInputs,
    SamplingInputs,
    block_arrays,
    forward_arrays,
    padding_arrays,
    sampling_arrays,
)
from worker_svc.gpu.staging import ALIGNMENT, Staging, largest_step_bytes, layout
from worker_svc.plan.plans import NO_APPENDS, Admission, BlockMoves, Plan
from worker_svc.plan.tables import RowTables
from worker_svc.runner.device_thread import MAX_IN_FLIGHT


@dataclass
class LateCopy:
    """A copy that happens only in `wait`."""

    host: Tensor
    device: Tensor
    arrived: list[bytes]
    is_over: bool = False

    def wait(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.arrived.append(bytes(self.host.numpy()))


class LateStreams(HostStreams):
    def __init__(self) -> None:
        self.copies: list[LateCopy] = []
        self.arrived: list[bytes] = []

    def send(self, host: Tensor, device: Tensor) -> LateCopy:  # type: ignore[override]
        self.copies.append(LateCopy(host, device, self.arrived))
        return self.copies[-1]


def test_a_buffer_is_not_written_while_it_is_copied() -> None:
    streams = LateStreams()
    staging = Staging(64, torch.device("cpu"), streams)
    sent = [np.array([number, 7 * number]) for number in range(10)]
    for array in sent:
        staging.send({"values": array})
    assert sum(copy.is_over for copy in streams.copies) == len(sent) - (MAX_IN_FLIGHT + 1)
    for copy in streams.copies:
        copy.wait()
    assert streams.arrived == [array.tobytes() for array in sent]


def test_arrays_arrive_as_they_are_each_at_an_aligned_place() -> None:
    staging = Staging(1000, torch.device("cpu"), HostStreams())
    arrays = {
        "odd": np.array([1, 2, 3], np.int32),
        "none": np.empty(0, np.int64),
        "floats": np.array([0.5], np.float32),
        "last": np.array([-1, 2**40], np.int64),
    }
    found = staging.send(arrays)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].numpy().dtype == array.dtype
        assert found[name].tolist() == array.tolist()
    assert all(region.offset % ALIGNMENT == 0 for region in layout(arrays).values())


def test_the_same_sizes_lie_in_the_same_places() -> None:
    """A graph reads from where it read when it was recorded."""
    staging = Staging(4096, torch.device("cpu"), HostStreams())
    one = staging.send({**padding_arrays(3, 8), "more": np.arange(5)})
    other = staging.send({**padding_arrays(3, 8), "much more": np.arange(99)})
    for name in padding_arrays(3, 8):
        assert one[name].data_ptr() == other[name].data_ptr()


@pytest.mark.parametrize(("num_scheduled", "num_padding"), [([1] * 40, 8), ([1] * 39 + [61], 0)])
def test_the_largest_step_has_room(num_scheduled: list[int], num_padding: int) -> None:
    """A full decode batch of a graph, and as many tokens as fit; all rows sample with
    log-probabilities and receive all their blocks."""
    max_num_seqs, max_num_tokens, max_blocks = 40, 100, 24
    tables = RowTables(
        max_num_seqs=max_num_seqs,
        max_model_len=max_blocks * 4,
        block_size=4,
        num_blocks=max_num_seqs * max_blocks + 1,
        max_num_batched_tokens=max_num_tokens,
    )
    plan = full_plan(num_scheduled, max_blocks)
    tables.apply(plan)
    inputs = tables.prepare(plan.rows, plan.num_scheduled_tokens)
    groups = {
        ForwardInputs: forward_arrays(plan.rows, inputs, max_num_seqs, num_padding),
        SamplingInputs: sampling_arrays(plan.rows, inputs, tables),
        BlockChanges: block_arrays(plan, tables),
    }
    for group, arrays in groups.items():
        assert list(arrays) == [field.name for field in fields(group)]
        assert all(array.itemsize <= 8 for array in arrays.values())
    step = {name: array for arrays in groups.values() for name, array in arrays.items()}
    assert len(step["logprob_indices"]) == max_num_seqs
    assert len(step["block_ids"]) == max_num_seqs * max_blocks
    end = max(region.end for region in layout(step).values())
    assert end <= largest_step_bytes(max_num_seqs, max_num_tokens, max_blocks)


def full_plan(num_scheduled: list[int], num_blocks: int) -> Plan:
    """Admit a row for each number of scheduled tokens, with `num_blocks` blocks each."""
    none = np.empty(0, np.int64)
    moves = BlockMoves(none, none)
    length = max(num_scheduled)
    admissions = tuple(
        Admission(
            row=row,
            token_ids=np.ones(length, np.int64),
            num_prompt_tokens=length,
            num_computed_tokens=length - num_tokens,
            block_ids=1 + row * num_blocks + np.arange(num_blocks),
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=row,
            num_logprobs=1,
            num_prompt_logprobs=0,
        )
        for row, num_tokens in enumerate(num_scheduled)
    )
    rows = np.arange(len(num_scheduled))
    return Plan(
        1, 1, none, admissions, NO_APPENDS, moves, moves, moves, rows, np.array(num_scheduled)
    )
