"""Blocks that are appended to the tables of many rows at once."""

import numpy as np
import pytest
from worker_driver import Sampling, Sequence, admit, append

from quire.internal.v1 import worker_pb2
from worker_svc.gpu.device_inputs import block_arrays
from worker_svc.plan.plans import Plan, PlanError, plan_from_proto, plan_to_proto
from worker_svc.plan.tables import RowTables


def tables_of_rows(*num_blocks: int) -> RowTables:
    tables = RowTables(
        max_num_seqs=4, max_model_len=24, block_size=4, num_blocks=50, max_num_batched_tokens=64
    )
    message = worker_pb2.BatchPlan(epoch=1, step=1)
    for row, count in enumerate(num_blocks):
        ids = list(range(10 * row + 1, 10 * row + 1 + count))
        admit(message, Sequence(row, [1, 2], 2, 0, ids, Sampling()))
    tables.apply(plan_from_proto(message))
    return tables


def appending(*appends: tuple[int, list[int]]) -> Plan:
    message = worker_pb2.BatchPlan(epoch=1, step=2)
    for row, ids in appends:
        append(message, row, ids)
    return plan_from_proto(message)


def test_each_row_gets_its_blocks_behind_those_it_has() -> None:
    tables = tables_of_rows(1, 3, 2)
    plan = appending((2, [40, 41, 42]), (0, [43]), (1, []))
    tables.apply(plan)
    assert tables.num_blocks.tolist() == [2, 3, 5, 0]
    assert tables.block_table.tolist() == [
        [1, 43, 0, 0, 0, 0],
        [11, 12, 13, 0, 0, 0],
        [21, 22, 40, 41, 42, 0],
        [0] * 6,
    ]
    changed = {name: values.tolist() for name, values in block_arrays(plan, tables).items()}
    assert changed == {"table_indices": [1, 14, 15, 16], "block_ids": [43, 40, 41, 42]}
    assert plan_to_proto(plan) == plan_to_proto(plan_from_proto(plan_to_proto(plan)))


def test_a_row_that_is_admitted_and_appended_to_changes_in_one_piece() -> None:
    tables = tables_of_rows(1)
    message = worker_pb2.BatchPlan(epoch=1, step=2)
    admit(message, Sequence(3, [1] * 5, 5, 0, [30, 31], Sampling()))
    append(message, 3, [32])
    plan = plan_from_proto(message)
    tables.apply(plan)
    changed = block_arrays(plan, tables)
    assert changed["table_indices"].tolist() == [18, 19, 20]
    assert changed["block_ids"].tolist() == [30, 31, 32]


@pytest.mark.parametrize(
    ("appends", "words"),
    [
        ([(0, [9]), (3, [8])], "row 3 holds no sequence"),
        ([(4_000_000_000, [8])], "row 4000000000 holds no sequence"),
        ([(0, [9]), (0, [8])], "a row gets blocks twice"),
        ([(0, [9]), (1, [5, 6, 7, 8])], "row 1: 7 blocks"),
        ([(0, [9]), (1, [8, 50])], "row 1: block ids must be 1 to 49"),
        ([(0, [0])], "row 0: block ids must be 1 to 49"),
    ],
)
def test_an_append_that_cannot_be_is_refused(
    appends: list[tuple[int, list[int]]], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        tables_of_rows(1, 3).apply(appending(*appends))


def test_numbers_of_blocks_must_add_up() -> None:
    message = worker_pb2.BatchPlan(epoch=1, step=2)
    message.appends.rows.append(0)
    message.appends.num_blocks.append(2)
    message.appends.block_ids.append(7)
    with pytest.raises(PlanError, match="their counts add up to 2"):
        plan_from_proto(message)
    assert np.array_equal(plan_from_proto(worker_pb2.BatchPlan()).appends.rows, [])
