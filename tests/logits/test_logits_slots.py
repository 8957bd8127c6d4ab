"""Lines of rows in tables on the device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from logits_pipeline import MAX_NUM_SEQS, context
from torch import Tensor

from worker_svc.logits.bad_words import BadWords
from worker_svc.logits.penalties import Penalties, largest_counts_bytes
from worker_svc.logits.processor import LogitsProcessor, ProcessorContext
from worker_svc.logits.slots import grown
from worker_svc.plan.logits_params import LogitsParams


@pytest.mark.parametrize(
    ("processor", "params"),
    [
        (Penalties, LogitsParams(presence_penalty=1.0)),
        (BadWords, LogitsParams(bad_words=(np.array([1, 2]),))),
    ],
)
def test_a_row_that_a_lack_of_memory_fails_keeps_no_slot(
    processor: Callable[[ProcessorContext], LogitsProcessor], params: LogitsParams
) -> None:
    given = context(10)
    lacking = [True]

    def upload(array: Any) -> Tensor:
        if lacking[0]:
            raise torch.OutOfMemoryError("no memory")
        return given.upload(array)

    made = processor(replace(given, upload=upload))
    tokens = np.array([3, 4])
    for _ in range(MAX_NUM_SEQS):
        with pytest.raises(torch.OutOfMemoryError):
            made.admit(0, params, tokens, 1)
    lacking[0] = False
    for row in range(MAX_NUM_SEQS):
        assert made.admit(row, params, tokens, 1)
    rows = np.arange(MAX_NUM_SEQS)
    made.apply(torch.zeros(MAX_NUM_SEQS, 10), rows, rows)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 40, 256, 257])
def test_counts_take_no_more_memory_than_is_kept_for_them(max_num_seqs: int) -> None:
    most, table = 0, torch.empty(0, 3)
    for num_lines in range(1, max_num_seqs + 1):
        larger = grown(table, num_lines, max_num_seqs)
        most = max(most, len(larger) + (len(table) if larger is not table else 0))
        table = larger
    assert largest_counts_bytes(max_num_seqs, 3) == most * 3 * 4
