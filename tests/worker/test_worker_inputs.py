"""Input preparation against a published worked example, every number of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention import attention_mask
from worker_svc.plan.inputs import InputBuffers, StepInputs, prepare_inputs

_EXAMPLE = json.loads((Path(__file__).parent / "prepare_inputs.json").read_text())
_ARRAYS = (
    "request_indices",
    "positions",
    "token_indices",
    "input_ids",
    "block_table_indices",
    "block_numbers",
    "block_offsets",
    "slot_mapping",
    "query_start_loc",
    "seq_lens",
)
_SCALARS = ("num_requests", "num_tokens", "max_query_len")
# Prompts 0 and 1 are complete in step 1; in step 2 all three sequences are.
_NUM_TOKENS = ([3, 2, 8], [4, 3, 8])
_LOGITS_INDICES = ([2, 4], [0, 1, 4])


def inputs_of(step: dict[str, Any], num_tokens: list[int]) -> StepInputs:
    return prepare_inputs(
        np.arange(3),
        np.array(step["num_scheduled_tokens"]),
        np.array(step["num_computed_tokens"]),
        np.array(num_tokens),
        np.array(step["token_table"], np.int32),
        np.array(step["block_table"], np.int32),
        _EXAMPLE["block_size"],
        InputBuffers(3, 10),
    )


@pytest.mark.parametrize("index", [0, 1])
def test_every_number_of_the_worked_example(index: int) -> None:
    step = _EXAMPLE["steps"][index]
    inputs = inputs_of(step, _NUM_TOKENS[index])
    expected = step["expected"]
    for name in _ARRAYS:
        assert getattr(inputs, name).tolist() == expected[name], name
    for name in _SCALARS:
        assert getattr(inputs, name) == expected[name], name
    assert {*_ARRAYS, *_SCALARS, "attention_mask_shape"} == set(expected)
    assert inputs.logits_indices.tolist() == _LOGITS_INDICES[index]


def test_attention_mask_of_whole_prompts_is_one_causal_square() -> None:
    step = _EXAMPLE["steps"][0]
    inputs = inputs_of(step, _NUM_TOKENS[0])
    mask = attention_mask(torch.arange(inputs.max_query_len), int(inputs.seq_lens.max()))
    assert list(mask.shape) == step["expected"]["attention_mask_shape"]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    # Every request's mask is the corner of the square.
    for start, end in zip(inputs.query_start_loc, inputs.query_start_loc[1:], strict=False):
        positions = torch.from_numpy(inputs.positions[start:end])
        length = end - start
        assert attention_mask(positions, length).equal(mask[:length, :length])


def test_attention_mask_of_chunks_has_a_row_per_scheduled_token() -> None:
    step = _EXAMPLE["steps"][1]
    inputs = inputs_of(step, _NUM_TOKENS[1])
    mask = attention_mask(torch.from_numpy(inputs.positions), int(inputs.seq_lens.max()))
    assert list(mask.shape) == step["expected"]["attention_mask_shape"]
    assert mask.int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]


def test_rows_may_stand_anywhere_in_the_tables() -> None:
    step = _EXAMPLE["steps"][1]
    order = np.array([2, 0])
    inputs = prepare_inputs(
        order,
        np.array([3, 1]),
        np.array([5, 3]),
        np.array([8, 4]),
        np.array(step["token_table"], np.int32),
        np.array(step["block_table"], np.int32),
        _EXAMPLE["block_size"],
        InputBuffers(3, 10),
    )
    assert inputs.input_ids.tolist() == [305, 306, 307, 103]
    assert inputs.slot_mapping.tolist() == [13, 16, 17, 5]
    assert inputs.logits_indices.tolist() == [2, 3]
