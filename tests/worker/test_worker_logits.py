"""Logits that are changed on their way from a model to the sampler, row by row."""

import numpy as np
import pytest
from tiny_models import VOCAB_SIZE, llama, save_model
from worker_driver import Sampling, Sequence, admit, schedule, worker_settings

from quire.internal.v1 import worker_pb2
from quire.internal.v1.logits_pb2 import LogitsParams
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.failures import InvalidField, RowFailure
from worker_svc.plan.plans import PlanError, StepOutput, plan_from_proto
from worker_svc.runner.step_runner import StepRunner

_PROMPTS = [[5, 17, 99], [3, 42, 8, 150], [61, 7]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> StepRunner:
    folder = save_model(llama(), tmp_path_factory.mktemp("llama"))
    return load_runner(worker_settings(folder, device="cpu")).runner


@pytest.fixture
def runner(loaded: StepRunner) -> StepRunner:
    loaded.clear()
    return loaded


def prompts(params: dict[int, LogitsParams], **sampling: float) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan(step=1)
    for row, tokens in enumerate(_PROMPTS):
        chosen = Sampling(**sampling)  # type: ignore[arg-type]
        admit(plan, Sequence(row, tokens, len(tokens), 0, [2 * row + 1, 2 * row + 2], chosen))
        schedule(plan, row, len(tokens))
        plan.admissions.logits_params.append(params.get(row, LogitsParams()).SerializeToString())
    return plan


def decode(step: int, *rows: int) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan(step=step)
    for row in rows:
        schedule(plan, row, 1)
    return plan


def run(runner: StepRunner, plan: worker_pb2.BatchPlan) -> StepOutput:
    return runner.launch(plan_from_proto(plan)).output()


def test_a_bias_decides_the_token_of_its_row_alone(runner: StepRunner) -> None:
    free = run(runner, prompts({})).sampled_token_ids
    runner.clear()
    bias = LogitsParams(bias_token_ids=[9, 4, VOCAB_SIZE + 5], biases=[1e4, 1e5, 1e6])
    assert run(runner, prompts({1: bias})).sampled_token_ids == [free[0], 4, free[2]]
    assert run(runner, decode(2, 1)).sampled_token_ids == [4]


def test_the_next_sequence_of_a_row_has_no_bias(runner: StepRunner) -> None:
    free = run(runner, prompts({})).sampled_token_ids
    runner.clear()
    run(runner, prompts({1: LogitsParams(bias_token_ids=[4], biases=[1e5])}))
    plan = prompts({})
    plan.released_rows.extend([0, 1, 2])
    assert run(runner, plan).sampled_token_ids == free


def test_raw_log_probabilities_are_those_of_the_model(runner: StepRunner) -> None:
    expected = run(runner, prompts({}, num_logprobs=20)).logprobs
    runner.clear()
    bias = LogitsParams(bias_token_ids=list(range(0, VOCAB_SIZE, 2)), biases=[7.0] * 106)
    found = run(runner, prompts({0: bias, 2: bias}, num_logprobs=20)).logprobs
    assert expected is not None
    assert found is not None
    # Apart from the chosen token, which comes first.
    top = [i for i in range(len(found.ranks)) if i % 20]
    assert found.token_ids[top].tolist() == expected.token_ids[top].tolist()
    assert found.logprobs[top].tolist() == expected.logprobs[top].tolist()


def test_processed_log_probabilities_are_those_of_changed_logits(runner: StepRunner) -> None:
    """Before temperature and typical_p, which exclude tokens, too."""
    found = run(runner, prompts({}, num_logprobs=21)).logprobs
    runner.clear()
    assert found is not None
    likely = found.token_ids[22:24].tolist()
    bias = LogitsParams(
        bias_token_ids=likely, biases=[-1000.0] * 2, processed_logprobs=True, typical_p=0.2
    )
    changed = run(runner, prompts({1: bias}, num_logprobs=21, temperature=3.0)).logprobs
    assert changed is not None
    for row in (0, 2):
        top = slice(21 * row + 1, 21 * row + 21)
        assert changed.token_ids[top].tolist() == found.token_ids[top].tolist()
        assert changed.logprobs[top].tolist() == found.logprobs[top].tolist()
    left = found.token_ids[24:42].tolist()
    assert changed.token_ids[22:40].tolist() == left
    # What the excluded tokens had is divided among the others.
    gained = -np.log1p(-np.exp(found.logprobs[22:24]).sum())
    np.testing.assert_allclose(changed.logprobs[22:40], found.logprobs[24:42] + gained, atol=1e-5)


def test_a_row_without_a_possible_token_fails_with_this_reason(runner: StepRunner) -> None:
    nothing = LogitsParams(bias_token_ids=range(VOCAB_SIZE), biases=[float("-inf")] * VOCAB_SIZE)
    output = run(runner, prompts({0: nothing}))
    assert output.failures == {0: RowFailure("no token is possible")}
    assert output.sampled_rows == [1, 2]
    assert run(runner, decode(2, 0, 1)).failures == output.failures


def test_fields_that_exclude_every_token_together_are_named(runner: StepRunner) -> None:
    together = LogitsParams(
        allowed_token_ids=[4, 5], bad_words_token_ids=[4, 5], bad_words_lengths=[1, 1]
    )
    failure = RowFailure(
        "excludes together with bad_words every token with which the output could go on",
        InvalidField("sampling_params.allowed_token_ids.ids", "NO_POSSIBLE_TOKEN"),
    )
    output = run(runner, prompts({1: together}))
    assert output.failures == {1: failure}
    assert output.sampled_rows == [0, 2]


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        LogitsParams(bias_token_ids=[1]).SerializeToString(),
        LogitsParams(bad_words_token_ids=[1]).SerializeToString(),
    ],
)
def test_a_plan_with_broken_parameters_is_refused(message: bytes) -> None:
    plan = prompts({})
    plan.admissions.logits_params[1] = message
    with pytest.raises(PlanError, match="logits_params"):
        plan_from_proto(plan)
