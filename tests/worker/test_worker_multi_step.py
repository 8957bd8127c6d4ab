"""Plans of several rounds: what they give is what plans of one round each would have given."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faulty_sim_runner import FaultySimRunner
from host_device import HostCapturer, pipelined
from sim_driver import SMALL
from tiny_models import llama, save_model
from triton_devices import NEEDS_GPU
from worker_driver import Sampling, Sequence, admit, append, schedule, worker_settings

from quire.internal.v1 import worker_pb2
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.plans import (
    Plan,
    PlanError,
    StepOutput,
    plan_from_proto,
    plan_to_proto,
    result_to_proto,
)
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.step_runner import Callback, PendingOutput, StepRunner, no_op
from worker_svc.service.recorder import Recorder, RecordingRunner
from worker_svc.service.step_inspector import StepInspector
from worker_svc.settings import WorkerSettings
from worker_svc.sim.runner import SimRunner
from worker_svc.sim.runner_loading import load_runner as load_sim_runner

# Rows 0 to 2: so many rounds each.
_ROUNDS = (3, 1, 2)


def prompts(step: int = 1) -> worker_pb2.BatchPlan:
    """Three sequences, of which all but the first ask for log-probabilities."""
    plan = worker_pb2.BatchPlan(epoch=1, step=step)
    for row in range(3):
        tokens = [5 + row, 6, 7 + row]
        sampling = Sampling(temperature=1.0, seed=row, num_logprobs=2 * row)
        admit(plan, Sequence(row, tokens, 3, 0, [1 + 2 * row], sampling))
        schedule(plan, row, 3)
    return plan


def decodes(step: int, num_rounds: tuple[int, ...]) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan(epoch=1, step=step)
    for row, count in enumerate(num_rounds):
        if count:
            append(plan, row, [2 + 2 * row] if step in (2, 7) else [])
            schedule(plan, row, 1)
    return plan


def in_rounds(step: int = 2) -> worker_pb2.BatchPlan:
    plan = decodes(step, _ROUNDS)
    plan.schedule.num_rounds.extend(_ROUNDS)
    return plan


def run(runner: StepRunner, *messages: worker_pb2.BatchPlan) -> list[StepOutput]:
    return [runner.launch(plan_from_proto(message)).output() for message in messages]


def gathered(outputs: list[StepOutput]) -> tuple[list[int], list[int], dict[int, str], Logprobs]:
    found = Logprobs.join(
        [len(output.sampled_rows) for output in outputs], [output.logprobs for output in outputs]
    )
    assert found is not None
    rows = [row for output in outputs for row in output.sampled_rows]
    token_ids = [token for output in outputs for token in output.sampled_token_ids]
    failures = {row: why for output in outputs for row, why in output.failures.items()}
    return rows, token_ids, failures, found.to_proto()


_WITH_MODELS = ["processor", "device", pytest.param("gpu", marks=NEEDS_GPU)]


def runner_with_model(kind: str, folder: Path) -> StepRunner:
    """One that knows no rounds."""
    device = "cuda" if kind == "gpu" else "cpu"
    loaded = load_runner(worker_settings(save_model(llama(), folder), device=device, num_blocks=50))
    assert isinstance(loaded.runner, MultiStepRunner)
    return pipelined(loaded, HostCapturer()) if kind == "device" else loaded.runner.runner


@pytest.fixture(params=["simulated", *_WITH_MODELS])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> StepRunner:
    if request.param == "simulated":
        return SimRunner(replace(SMALL, step_ms=0.1))
    return runner_with_model(request.param, tmp_path)


def test_rounds_give_the_output_of_single_steps(runner: StepRunner) -> None:
    single = run(runner, prompts(), *(decodes(2 + done, rounds(done)) for done in range(3)))
    last = worker_pb2.BatchPlan(epoch=1, step=5, released_rows=[0, 1, 2])
    run(runner, last)
    whole = run(MultiStepRunner(runner), prompts(6), in_rounds(7), decodes(8, (1, 1, 1)))
    assert gathered(single[1:]) == gathered(whole[1:2])
    assert whole[1].sampled_rows == [0, 1, 2, 0, 2, 0]
    assert whole[2].sampled_rows == [0, 1, 2]
    assert runner.last_finished_step == 8
    assert whole[1].times.forward_ns > 0


def rounds(done: int) -> tuple[int, ...]:
    return tuple(int(count > done) for count in _ROUNDS)


def test_a_row_that_fails_does_not_run_again() -> None:
    sim = FaultySimRunner(SMALL)
    runner = MultiStepRunner(sim)
    run(runner, prompts())
    sim.failing_seeds.add(2)
    [output] = run(runner, in_rounds())
    assert list(output.failures) == [2]
    assert output.sampled_rows == [0, 1, 0, 0]
    assert output.logprobs is not None
    assert output.logprobs.num_entries.tolist() == [0, 2, 0, 0]


def test_a_row_that_fails_in_a_later_round_keeps_earlier_tokens() -> None:
    sim = FaultySimRunner(SMALL)
    failing = _Failing(sim, seeds=[0], in_round=1)
    [_, output] = run(MultiStepRunner(failing), prompts(), in_rounds())
    assert list(output.failures) == [0]
    assert output.sampled_rows == [0, 1, 2, 2]


@pytest.mark.parametrize("kind", _WITH_MODELS)
def test_a_model_that_fails_in_a_later_round_keeps_earlier_tokens(
    kind: str, tmp_path: Path
) -> None:
    runner = runner_with_model(kind, tmp_path)
    rounds = MultiStepRunner(runner)
    [_, whole] = run(rounds, prompts(), in_rounds())
    first_of_row_0 = whole.sampled_token_ids[0]
    assert whole.sampled_token_ids.count(first_of_row_0) == 1
    run(rounds, worker_pb2.BatchPlan(epoch=1, step=3, released_rows=[0, 1, 2]))
    # The model returns NaN for that token, which row 0 reads in its second round.
    model = getattr(runner, "_model").network  # noqa: B009
    model.get_input_embeddings().weight.data[first_of_row_0] = torch.nan
    [_, failed] = run(rounds, prompts(6), in_rounds(7))
    assert list(failed.failures) == [0]
    kept = [0, 1, 2, 4]
    assert failed.sampled_rows == [whole.sampled_rows[i] for i in kept]
    assert failed.sampled_token_ids == [whole.sampled_token_ids[i] for i in kept]
    assert failed.logprobs is not None
    assert failed.logprobs.num_entries.tolist() == [0, 2, 4, 4]
    [after] = run(rounds, decodes(8, (0, 1, 1)))
    assert after.sampled_rows == [1, 2]
    assert not after.failures


class _Failing:
    """Has seeds fail in a round and behind it."""

    def __init__(self, sim: FaultySimRunner, seeds: Iterable[int], in_round: int) -> None:
        self._sim, self._seeds, self._in_round = sim, seeds, in_round
        self.last_finished_step = 0

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        if plan.round == self._in_round:
            self._sim.failing_seeds.update(self._seeds)
        return self._sim.launch(plan, before_blocking)

    def clear(self) -> None:
        self._sim.clear()


def test_rounds_without_blocks_are_refused() -> None:
    runner = MultiStepRunner(SimRunner(SMALL))
    run(runner, prompts())
    plan = worker_pb2.BatchPlan(epoch=1, step=2)
    schedule(plan, 0, 1)
    plan.schedule.num_rounds.append(2)
    with pytest.raises(PlanError, match="without a block"):
        run(runner, plan)


@pytest.mark.parametrize(
    ("num_rounds", "words"), [([1], "parallel"), ([1, 0, 2], "one round at least")]
)
def test_rounds_that_contradict_the_rows_are_refused(num_rounds: list[int], words: str) -> None:
    plan = in_rounds()
    del plan.schedule.num_rounds[:]
    plan.schedule.num_rounds.extend(num_rounds)
    with pytest.raises(PlanError, match=words):
        plan_from_proto(plan)


def test_a_plan_of_rounds_is_read_as_it_was_written() -> None:
    assert plan_to_proto(plan_from_proto(in_rounds())) == in_rounds()
    [only] = plan_from_proto(prompts()).rounds()
    assert plan_to_proto(only) == prompts()


@pytest.mark.parametrize("seeds", [(0,), (0, 2)], ids=["a row", "all that are left"])
def test_a_recording_of_failures_in_later_rounds_fails_again(
    tmp_path: Path, seeds: tuple[int, ...]
) -> None:
    path = tmp_path / "steps"
    recorder = Recorder(path)
    runner = _Failing(FaultySimRunner(SMALL), seeds, in_round=1)
    recorder.put(hello())
    messages = [prompts(), in_rounds()]
    outputs = run(RecordingRunner(MultiStepRunner(runner), recorder), *messages)
    recorder.close()
    assert tuple(outputs[1].failures) == seeds
    again = run(load_sim_runner(settings(path)).runner, *messages)
    for one, other in zip(outputs, again, strict=True):
        assert one.sampled_rows == other.sampled_rows
        assert one.sampled_token_ids == other.sampled_token_ids
        assert one.failures == other.failures


def test_a_recording_of_rounds_is_sampled_again_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    recorder = Recorder(path)
    sim = SimRunner(SMALL)
    runner = RecordingRunner(MultiStepRunner(sim), recorder)
    recorder.put(hello())
    messages = [prompts(), in_rounds(), decodes(3, (1, 1, 1))]
    outputs = run(runner, *messages)
    recorder.close()

    again = run(load_sim_runner(settings(path)).runner, *messages)
    results = [
        [result_to_proto(plan_from_proto(m), o) for m, o in zip(messages, given, strict=True)]
        for given in (outputs, again)
    ]
    for result in (*results[0], *results[1]):
        result.ClearField("times")
    assert results[0] == results[1]

    inspector = StepInspector()
    inspector.add(worker_pb2.Recording(hello=hello()))
    for message, result in zip(messages, results[0], strict=True):
        inspector.add(worker_pb2.Recording(plan=message))
        explained = inspector.step()
        inspector.add(worker_pb2.Recording(result=result))
    assert list(explained.num_computed_tokens) == [6, 4, 5]
    assert list(explained.seq_lens) == [7, 5, 6]
    token_ids = outputs[1].sampled_token_ids
    assert list(explained.input_ids) == [token_ids[5], token_ids[1], token_ids[4]]


def settings(recording: Path) -> WorkerSettings:
    flags = {
        "engine": "sim",
        "sim-tokens": recording,
        "sim-vocab-size": 900,
        "block-size": SMALL.block_size,
        "num-blocks": SMALL.num_blocks,
        "max-num-seqs": SMALL.max_num_seqs,
        "max-model-len": SMALL.max_model_len,
    }
    return WorkerSettings.load([f"--{key}={value}" for key, value in flags.items()])


def hello() -> worker_pb2.Hello:
    return worker_pb2.Hello(
        block_size=SMALL.block_size,
        num_blocks=SMALL.num_blocks,
        max_num_seqs=SMALL.max_num_seqs,
        max_model_len=SMALL.max_model_len,
        max_num_batched_tokens=SMALL.max_num_batched_tokens,
    )
