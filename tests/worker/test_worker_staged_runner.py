"""Plans of different rows side by side, in a pipeline of stages whose ranks are threads here."""

from pathlib import Path
from typing import Any

import pytest
from draft_models import save_disturbed
from rank_runners import check_equal_outputs, decoded, outputs_of, runner_of, staged
from shard_models import prepared
from tiny_models import FAMILIES, MIXTURES, VOCAB_SIZE, llama, save_model
from worker_driver import Sampling, Sequence, admit, append, schedule

from quire.internal.v1 import worker_pb2
from worker_svc.plan.plans import plan_from_proto
from worker_svc.runner.staged_runner import StagedRunner
from worker_svc.runner.step_runner import StepRunner

# The others run in `make test-slow`.
_FAST = ("llama", "gpt_oss")
_PROMPT = [5, 17, 99, 3, 42, 8, 150]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


class Rows:
    """Two rows that decode, each with a plan of its own."""

    def __init__(self) -> None:
        self.step = 0

    def plan(self, row: int, *, is_new: bool = False, lookahead: int = 0) -> Any:
        self.step += 1
        plan = worker_pb2.BatchPlan(step=self.step)
        if is_new:
            blocks = list(range(1 + row * 9, 10 + row * 9))
            admit(plan, Sequence(row, [*_PROMPT, row], 8, 0, blocks, Sampling(1.0, seed=row)))
        schedule(plan, row, 8 if is_new else 1)
        if lookahead:
            plan.schedule.num_lookahead_tokens.append(lookahead)
        return plan_from_proto(plan)


def alternating(runner: StepRunner, num_tokens: int) -> list[list[int]]:
    """The tokens of two rows. The plan of one is launched before the result of the other is
    read."""
    rows = Rows()
    tokens: list[list[int]] = [[], []]
    launched = [runner.launch(rows.plan(row, is_new=True)) for row in (0, 1)]
    for _ in range(num_tokens):
        for row in (0, 1):
            tokens[row] += launched[row].output().sampled_token_ids
            launched[row] = runner.launch(rows.plan(row))
    for one in launched:
        one.output()
    return tokens


@pytest.mark.parametrize(
    "name",
    [
        name if name in _FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in (*FAMILIES, *MIXTURES)
    ],
)
def test_rows_in_different_plans_get_their_tokens(tmp_path: Path, name: str) -> None:
    model = save_model((FAMILIES | MIXTURES)[name](), tmp_path)
    expected = alternating(runner_of(prepared(model), None), 24)
    for num_ranks in (2, 4):
        with staged(model, num_ranks) as runner:
            assert isinstance(runner, StagedRunner)
            assert alternating(runner, 24) == expected


def test_a_step_begins_before_the_one_before_has_ended(model: Path) -> None:
    with staged(model) as runner:
        rows = Rows()
        first = runner.launch(rows.plan(0, is_new=True))
        second = runner.launch(rows.plan(1, is_new=True))
        assert runner.last_finished_step == 0
        first.output()
        assert runner.last_finished_step == 1
        second.output()
        assert runner.last_finished_step == 2


def test_a_plan_waits_for_the_steps_of_its_rows(model: Path) -> None:
    """Such plans come when a row is preempted."""

    def tokens(runner: StepRunner) -> list[list[int]]:
        rows = Rows()
        plans = [rows.plan(0, is_new=True), rows.plan(1, is_new=True)]
        plans += [rows.plan(row) for row in (0, 0, 1)]
        released = worker_pb2.BatchPlan(step=6, released_rows=[0])
        admit(released, Sequence(0, [3, 4, 5], 3, 0, [19], Sampling(1.0, seed=9)))
        schedule(released, 0, 3)
        plans.append(plan_from_proto(released))
        appended = worker_pb2.BatchPlan(step=7)
        append(appended, 1, [9])
        schedule(appended, 1, 1)
        plans.append(plan_from_proto(appended))
        launched = [runner.launch(plan) for plan in plans]
        return [one.output().sampled_token_ids for one in launched]

    expected = tokens(runner_of(prepared(model), None))
    with staged(model) as runner:
        assert tokens(runner) == expected


def test_a_clear_drops_what_runs(model: Path) -> None:
    expected = alternating(runner_of(prepared(model), None), 3)
    with staged(model) as runner:
        rows = Rows()
        runner.launch(rows.plan(0, is_new=True))
        runner.launch(rows.plan(1, is_new=True))
        runner.clear()
        assert alternating(runner, 3) == expected


def test_stages_move_blocks_and_compute_prompt_logprobs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slices of three tokens.
    monkeypatch.setattr("worker_svc.runner.prompt_slices._SLICE_BYTES", 3 * 4 * VOCAB_SIZE)
    expected = outputs_of(runner_of(prepared(model), None))
    with staged(model, 4) as runner:
        found = outputs_of(runner)
    check_equal_outputs(found, expected)


def test_a_step_that_samples_nothing_ends_when_all_stages_have_run(model: Path) -> None:
    with staged(model) as runner:
        plan = worker_pb2.BatchPlan(step=1)
        admit(plan, Sequence(0, list(_PROMPT), len(_PROMPT), 0, [1, 2]))
        schedule(plan, 0, 3)
        output = runner.launch(plan_from_proto(plan)).output()
        assert output.sampled_rows == []


def test_rank_0_speculates_by_prompt_lookup(model: Path) -> None:
    expected = decoded(runner_of(prepared(model), None), 20)
    with staged(model, drafts=3) as runner:
        assert decoded(runner, 20) == expected


def speculating(runner: StepRunner, num_tokens: int) -> tuple[list[list[int]], int]:
    """As `alternating`, with look-ahead; also the number of drafts that were accepted."""
    rows = Rows()
    tokens: list[list[int]] = [[], []]
    num_accepted = 0
    launched = {row: runner.launch(rows.plan(row, is_new=True)) for row in (0, 1)}
    while launched:
        for row in list(launched):
            output = launched.pop(row).output()
            tokens[row] += output.sampled_token_ids
            num_accepted += sum(output.num_accepted_tokens)
            if len(tokens[row]) < num_tokens:
                launched[row] = runner.launch(rows.plan(row, lookahead=4))
    return [each[:num_tokens] for each in tokens], num_accepted


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rank_0_runs_a_draft_model(model: Path, tmp_path: Path, num_ranks: int) -> None:
    """Its tokens are in fewer steps, also where another row's step has not ended."""
    draft = save_disturbed(model, tmp_path)
    expected = alternating(runner_of(prepared(model), None), 20)
    with staged(model, num_ranks, drafts=3, draft_model=draft) as runner:
        found, num_accepted = speculating(runner, 20)
        assert found == expected
        assert num_accepted > 4
        runner.clear()
        assert speculating(runner, 20)[0] == expected
