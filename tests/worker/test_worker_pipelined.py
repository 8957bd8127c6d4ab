"""Steps behind one another on a device: launched before the tokens of those before are known."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from host_device import HostCapturer, pipelined
from tiny_models import VOCAB_SIZE, llama, save_model
from worker_driver import Sampling, Sequence, admit, append, schedule, worker_settings

from benchmarks.engines.batcher import steps
from benchmarks.engines.workload import Work
from quire.internal.v1 import worker_pb2
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.plans import PlanError, StepOutput, plan_from_proto
from worker_svc.runner.step_runner import LoadedRunner, PendingOutput, StepRunner

_POISONED = 200
_ROWS, _BUDGET = 11, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def loaded(model: Path) -> LoadedRunner:
    sizes = {"max_num_seqs": _ROWS, "max_num_batched_tokens": _BUDGET, "num_blocks": 300}
    return load_runner(worker_settings(model, device="cpu", **sizes))


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def runner(loaded: LoadedRunner, request: pytest.FixtureRequest) -> PipelinedRunner:
    return pipelined(loaded, HostCapturer() if request.param else None)


def work() -> Work:
    """More than there are rows, prompts longer than a step among them."""
    draw = Random(3)
    prompts = [
        [draw.randrange(_POISONED) for _ in range(draw.choice([1, 3, 4, 8, 21, 60]))]
        for _ in range(30)
    ]
    return Work(prompts, [draw.randrange(1, 20) for _ in prompts])


def outputs(loaded: LoadedRunner, runner: StepRunner, depth: int) -> list[list[int]]:
    """The work's tokens, with so many steps launched before the first one's output is read."""
    written: list[list[int]] = [[] for _ in work().prompts]
    waiting: list[tuple[dict[int, int], PendingOutput[StepOutput]]] = []
    identity = loaded.identity

    def complete_oldest() -> None:
        sampling, launched = waiting.pop(0)
        output = launched.output()
        assert not output.failures
        for row, token in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            written[sampling[row]].append(token)

    for step in steps(
        work(),
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_BUDGET,
        block_size=identity.block_size,
        num_blocks=identity.num_blocks,
    ):
        waiting.append((step.sampling, runner.launch(plan_from_proto(step.plan))))
        if len(waiting) == depth:
            complete_oldest()
    while waiting:
        complete_oldest()
    return written


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_those_of_steps_one_at_a_time(
    loaded: LoadedRunner, runner: PipelinedRunner, depth: int
) -> None:
    expected = outputs(loaded, loaded.runner, 1)
    loaded.runner.clear()
    assert len({tuple(tokens) for tokens in expected}) > 20
    assert outputs(loaded, runner, depth) == expected


@dataclass
class Plans:
    """Plans of numbered steps."""

    step: int = 0

    def launch(
        self, runner: StepRunner, message: worker_pb2.BatchPlan
    ) -> PendingOutput[StepOutput]:
        self.step += 1
        message.epoch, message.step = 1, self.step
        return runner.launch(plan_from_proto(message))


@pytest.fixture
def plans() -> Plans:
    return Plans()


@pytest.fixture
def poisoned(runner: PipelinedRunner) -> Iterator[PipelinedRunner]:
    """A model that gives no numbers once it has read one of its tokens."""
    weight = runner._model.network.get_input_embeddings().weight
    weight.data[_POISONED] = torch.nan
    return runner


def two_sequences(num_logprobs: int = 0) -> worker_pb2.BatchPlan:
    """Row 0 fails, row 1 does not."""
    plan = worker_pb2.BatchPlan()
    sampling = Sampling(num_logprobs=num_logprobs)
    for row, tokens in enumerate(([1, 2, _POISONED], [4, 5])):
        admit(plan, Sequence(row, tokens, len(tokens), 0, [2 * row + 1, 2 * row + 2], sampling))
        schedule(plan, row, len(tokens))
    return plan


def decode(*rows: int) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan()
    for row in rows:
        schedule(plan, row, 1)
    return plan


def test_a_row_that_fails_fails_in_the_steps_behind_it_too(
    poisoned: PipelinedRunner, plans: Plans
) -> None:
    launched = [
        plans.launch(poisoned, plan) for plan in (two_sequences(), decode(0, 1), decode(1, 0))
    ]
    results = [step.output() for step in launched]
    assert [list(result.failures) for result in results] == [[0]] * 3
    assert ["finite" in result.failures[0].message for result in results] == [True] * 3
    assert [result.sampled_rows for result in results] == [[1]] * 3
    assert all(0 <= result.sampled_token_ids[0] < VOCAB_SIZE for result in results)


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 3])
def test_a_row_whose_prompt_has_no_log_probabilities_fails(
    loaded: LoadedRunner,
    poisoned: PipelinedRunner,
    plans: Plans,
    num_tokens: int,
    is_pipelined: bool,
) -> None:
    """Also in a chunk that samples nothing."""
    plan = worker_pb2.BatchPlan()
    for row, tokens in enumerate(([1, _POISONED, 5], [4, 5, 6])):
        asked = Sampling(num_prompt_logprobs=2)
        admit(plan, Sequence(row, tokens, 3, 0, [2 * row + 1, 2 * row + 2], asked))
        schedule(plan, row, num_tokens)
    runner = poisoned if is_pipelined else loaded.runner
    output = plans.launch(runner, plan).output()
    assert list(output.failures) == [0]
    assert output.sampled_rows == ([1] if num_tokens == 3 else [])


def test_the_next_sequence_of_a_row_does_not_fail_for_the_one_before(
    poisoned: PipelinedRunner, plans: Plans
) -> None:
    # The plan that releases the row was made before the failure was reported.
    first = plans.launch(poisoned, two_sequences())
    plan = decode(1)
    plan.released_rows.append(0)
    admit(plan, Sequence(0, [7, 8], 2, 0, [9, 10]))
    schedule(plan, 0, 2)
    second, third = plans.launch(poisoned, plan), plans.launch(poisoned, decode(0, 1))
    assert list(first.output().failures) == [0]
    for step in (second, third):
        output = step.output()
        assert not output.failures
        assert sorted(output.sampled_rows) == [0, 1]


def test_log_probabilities_are_those_of_rows_that_did_not_fail(
    poisoned: PipelinedRunner, plans: Plans
) -> None:
    first = plans.launch(poisoned, two_sequences(num_logprobs=3))
    second = plans.launch(poisoned, decode(0, 1))
    for output in (first.output(), second.output()):
        assert output.sampled_rows == [1]
        assert output.logprobs is not None
        assert output.logprobs.num_entries.tolist() == [3]
        assert output.logprobs.token_ids[0] == output.sampled_token_ids[0]


def test_a_step_is_finished_when_its_output_is_there(runner: PipelinedRunner, plans: Plans) -> None:
    first, second = plans.launch(runner, two_sequences()), plans.launch(runner, decode(0, 1))
    assert runner.last_finished_step == 0
    first.output()
    assert runner.last_finished_step == 1
    times = second.output().times
    assert runner.last_finished_step == 2
    assert min(times.preparing_ns, times.forward_ns, times.sampling_ns) > 0
    assert 0 <= times.starting_ns <= times.waiting_ns


def test_a_plan_that_cannot_be_run_leaves_those_before_it_alone(
    runner: PipelinedRunner, plans: Plans
) -> None:
    first = plans.launch(runner, two_sequences())
    with pytest.raises(PlanError, match="no sequence held"):
        plans.launch(runner, decode(5))
    assert first.output().sampled_rows == [0, 1]
    runner.clear()
    assert plans.launch(runner, two_sequences()).output().sampled_rows == [0, 1]


def test_blocks_reach_the_table_of_the_device(runner: PipelinedRunner, plans: Plans) -> None:
    table = runner._forward.block_table
    plans.launch(runner, two_sequences()).output()
    assert table[:2, :2].tolist() == [[1, 2], [3, 4]]
    plan = worker_pb2.BatchPlan(released_rows=[0])
    append(plan, 1, [5, 6])
    admit(plan, Sequence(0, [1], 1, 0, [7]))
    # Also without a row that runs.
    assert plans.launch(runner, plan).output().sampled_rows == []
    assert table[0, :1].tolist() == [7]
    assert table[1, :4].tolist() == [3, 4, 5, 6]
    assert not table[runner._forward.padding_row].any()
