"""How many tokens rows with look-ahead compute in a step."""

import numpy as np
import pytest
from tiny_models import VOCAB_SIZE, llama, save_model
from torch import Tensor
from worker_driver import Sampling, Sequence, admit, append, schedule, worker_settings

from quire.internal.v1 import logits_pb2, worker_pb2
from worker_svc.loading.runner_loading import load_runner
from worker_svc.logits import built_in
from worker_svc.logits.processor import ProcessorContext
from worker_svc.plan.failures import RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.jumps import jump
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.plans import NO_APPENDS, Admission, BlockMoves, Plan, plan_from_proto
from worker_svc.plan.tables import RowTables
from worker_svc.runner.step_runner import StepRunner

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
        appends=NO_APPENDS,
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
    made.fail(0, RowFailure("broken"))
    found, counts, failures = made.runnable(plan((1, 1), (8, 8)))
    assert (found.tolist(), counts.tolist(), failures) == ([1], [4], {0: RowFailure("broken")})


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


class Staircase:
    """After each token divisible by 3 it forces the next ones: each is its predecessor plus 1, up
    to the next multiple of 3 but one. Rows with a bias have it."""

    needs_token_ids = True

    def __init__(self, context: ProcessorContext) -> None:
        self._last: dict[int, list[int]] = {}

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        self._last[row] = token_ids[num_prompt_tokens:].tolist()
        return True

    def release(self, row: int) -> None:
        del self._last[row]

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        for line, row in zip(lines.tolist(), rows.tolist(), strict=True):
            self._last[row].append(int(token_ids[line]))

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        for line, row in zip(lines.tolist(), rows.tolist(), strict=True):
            if (token_id := self.forced_token(row)) is not None:
                kept = logits[line, token_id].clone()
                logits[line] = float("-inf")
                logits[line, token_id] = kept

    def forced_token(self, row: int) -> int | None:
        output = self._last[row]
        if not output or output[-1] + 1 >= VOCAB_SIZE:
            return None
        if output[-1] % 3 == 0 or (len(output) > 1 and output[-2] % 3 == 0):
            return output[-1] + 1
        return None


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> StepRunner:
    folder = save_model(llama(), tmp_path_factory.mktemp("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(built_in, "_BUILT_IN", (Staircase,))
        return load_runner(worker_settings(folder, device="cpu")).runner


def outputs(runner: StepRunner, count: int, lookahead: int) -> tuple[list[list[int]], int]:
    """The first tokens of three rows, and the number of steps that they took. Blocks are appended
    for one token per step, as long as the rows have fewer than they need."""
    runner.clear()
    prompts = [[5, 17, 99], [3, 42, 8, 150, 7], [61, 7]]
    found: list[list[int]] = [[], [], []]
    free = list(range(60, 0, -1))
    sequences = [
        Sequence(row, tokens, len(tokens), sampling=Sampling(temperature=1, seed=row))
        for row, tokens in enumerate(prompts)
    ]
    message, step = worker_pb2.BatchPlan(step=1), 1
    for row, (tokens, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        sequence.blocks_for(len(tokens), free)
        admit(message, sequence)
        message.admissions.logits_params.append(
            logits_pb2.LogitsParams(bias_token_ids=[0], biases=[1]).SerializeToString()
        )
        schedule(message, row, len(tokens))
    while min(map(len, found)) < count:
        message.schedule.num_lookahead_tokens[:] = [lookahead] * len(message.schedule.rows)
        output = runner.launch(plan_from_proto(message)).output()
        assert not output.failures
        for row, token_id in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            found[row].append(token_id)
        step += 1
        message = worker_pb2.BatchPlan(step=step)
        for row, sequence in enumerate(sequences):
            schedule(message, row, 1)
            append(message, row, sequence.blocks_for(len(prompts[row]) + len(found[row]), free))
    return [tokens[:count] for tokens in found], step - 1


def test_jumps_of_a_model_change_no_token_and_save_steps(runner: StepRunner) -> None:
    one_by_one, num_steps = outputs(runner, 30, 0)
    for lookahead in (1, 3, 16):
        jumped, num_fewer = outputs(runner, 30, lookahead)
        assert jumped == one_by_one
        assert num_fewer < num_steps
