"""How many tokens rows with look-ahead compute in a step."""

import numpy as np
import pytest

from worker_svc.plan.jumps import jump
from worker_svc.plan.plans import Admission, BlockMoves, Plan
from worker_svc.plan.tables import RowTables

_NOTHING = np.empty(0, np.int64)
_NO_MOVES = BlockMoves(_NOTHING, _NOTHING)
MAX_MODEL_LEN = 32


def tables(*rows: tuple[int, int, int], budget: int = 100) -> RowTables:
    """Tables whose row i has (tokens, computed tokens, blocks of 4) = rows[i]."""
    made = RowTables(
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_blocks=64,
        max_num_batched_tokens=budget,
    )
    first = 1
    for row, (num_tokens, num_computed, num_blocks) in enumerate(rows):
        blocks = np.arange(first, first + num_blocks)
        first += num_blocks
        known = min(num_tokens, MAX_MODEL_LEN - 1)
        made.apply(plan(admissions=(admission(row, known, num_computed - 1, blocks),)))
        for token_id in range(known, num_tokens):
            made.append_token(row, token_id)
        made.advance(np.array([row]), np.array([num_computed]))
    return made


def admission(row: int, num_tokens: int, num_computed: int, blocks: np.ndarray) -> Admission:
    return Admission(
        row=row,
        token_ids=np.arange(num_tokens),
        num_prompt_tokens=1,
        num_computed_tokens=num_computed,
        block_ids=blocks,
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=0,
        seed=0,
        num_logprobs=0,
        num_prompt_logprobs=0,
    )


def plan(
    scheduled: tuple[int, ...] = (),
    lookahead: tuple[int, ...] = (),
    admissions: tuple[Admission, ...] = (),
) -> Plan:
    """A plan that runs the first rows, with so many tokens each."""
    return Plan(
        epoch=1,
        step=1,
        released_rows=_NOTHING,
        admissions=admissions,
        appends=(),
        swap_outs=_NO_MOVES,
        swap_ins=_NO_MOVES,
        copies=_NO_MOVES,
        rows=np.arange(len(scheduled)),
        num_scheduled_tokens=np.array(scheduled, np.int64),
        num_lookahead_tokens=np.array(lookahead, np.int64),
    )


@pytest.mark.parametrize(
    ("rows", "scheduled", "lookahead", "budget", "runs"),
    [
        # As scheduled: no look-ahead, or no jump before.
        ([(5, 4, 2)], (1,), (), 100, {0: 1}),
        ([(5, 4, 2)], (1,), (8,), 100, {0: 1}),
        ([(9, 1, 3)], (8,), (8,), 100, {0: 8}),
        # The tokens of a jump, all of them or as many as fit into the blocks.
        ([(8, 4, 2)], (1,), (8,), 100, {0: 4}),
        ([(8, 4, 2)], (1,), (2,), 100, {0: 3}),
        ([(11, 4, 2)], (1,), (8,), 100, {0: 4}),
        # A row without a free slot, or at the model's length, waits.
        ([(11, 8, 2), (5, 4, 2)], (1, 1), (8, 8), 100, {1: 1}),
        ([(32, 31, 8), (5, 4, 2)], (1, 1), (8, 8), 100, {1: 1}),
        # The budget has room for what was scheduled; jumps share the rest in order.
        ([(8, 4, 2), (8, 4, 2), (8, 4, 2)], (1, 1, 1), (8, 8, 8), 8, {0: 4, 1: 3, 2: 1}),
        ([(8, 4, 2), (8, 4, 2)], (1, 1), (8, 0), 100, {0: 4, 1: 1}),
        ([(8, 4, 2), (8, 4, 2)], (1, 1), (8, 8), 2, {0: 1, 1: 1}),
    ],
)
def test_a_row_computes_what_jumps_have_added(rows, scheduled, lookahead, budget, runs):
    found, counts, failures = tables(*rows, budget=budget).runnable(plan(scheduled, lookahead))
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == runs
    assert failures == {}


def test_failed_rows_do_not_run():
    made = tables((8, 4, 2), (8, 4, 2))
    made.fail(0, "broken")
    found, counts, failures = made.runnable(plan((1, 1), (8, 8)))
    assert (found.tolist(), counts.tolist(), failures) == ([1], [4], {0: "broken"})


def test_a_jump_ends_at_its_look_ahead_and_at_the_length_of_the_model():
    made = tables((5, 4, 2), (30, 29, 8), (5, 4, 2))
    asked = []

    def forced_tokens(row: int, most: int) -> list[int]:
        asked.append((row, most))
        return [7] * most

    jumps = jump(plan((1, 1, 1), (3, 8, 0)), made, np.array([0, 1, 2]), forced_tokens)
    assert asked == [(0, 3), (1, 2)]
    assert (jumps.rows, jumps.token_ids) == ([0, 0, 0, 1, 1], [7] * 5)
    assert made.num_tokens[:3].tolist() == [8, 32, 5]
    assert made.token_table[0, 5:8].tolist() == [7, 7, 7]
