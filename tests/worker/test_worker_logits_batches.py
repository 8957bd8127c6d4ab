"""Sequences with every processor on: the same tokens alone, in a batch, in chunks, after
preemption, in rounds, and in steps behind one another on a device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_device import HostCapturer, HostCopies, pipelined
from logits_jobs import NUM_JOBS, NUM_OUTPUT, Job, Schedule, changed_jobs, run_jobs
from tiny_models import llama, save_model
from torch import Tensor
from worker_driver import worker_settings

from worker_svc.gpu.device_forward import DeviceForward
from worker_svc.loading.runner_loading import load_runner
from worker_svc.logits.processor import ProcessorContext
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.step_runner import LoadedRunner, StepRunner


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedRunner:
    folder = save_model(llama(), tmp_path_factory.mktemp("llama"))
    return load_runner(worker_settings(folder, device="cpu", max_num_batched_tokens=1000))


@pytest.fixture(scope="module")
def expected(loaded: LoadedRunner) -> list[list[int]]:
    """All in one batch."""
    found = run_jobs(loaded.runner, changed_jobs(), Schedule())
    loaded.runner.clear()
    assert all(len(tokens) == NUM_OUTPUT for tokens in found)
    free = run_jobs(
        loaded.runner, [replace(job, params=None) for job in changed_jobs()], Schedule()
    )
    loaded.runner.clear()
    same = [index for index in range(NUM_JOBS) if free[index] == found[index]]
    assert same == list(range(0, NUM_JOBS, 4))
    return found


def host(loaded: LoadedRunner) -> StepRunner:
    return loaded.runner


def eager(loaded: LoadedRunner) -> StepRunner:
    return MultiStepRunner(pipelined(loaded))


def graphs(loaded: LoadedRunner) -> StepRunner:
    return MultiStepRunner(pipelined(loaded, HostCapturer()))


every_runner = pytest.mark.parametrize("make", [host, eager, graphs])


@every_runner
@pytest.mark.parametrize(
    "how",
    [
        Schedule(),
        Schedule(chunk=3),
        Schedule(preempted_every=3),
        Schedule(chunk=4, preempted_every=8),
        Schedule(num_rounds=4),
        Schedule(depth=2),
        Schedule(chunk=3, depth=3, num_rounds=3),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_schedule(
    make: Callable[[LoadedRunner], StepRunner],
    how: Schedule,
    loaded: LoadedRunner,
    expected: list[list[int]],
) -> None:
    runner = make(loaded)
    found = run_jobs(runner, changed_jobs(), how)
    runner.clear()
    assert found == expected


@every_runner
def test_tokens_do_not_depend_on_the_batch(
    make: Callable[[LoadedRunner], StepRunner], loaded: LoadedRunner, expected: list[list[int]]
) -> None:
    runner = make(loaded)
    for index in (0, 1, 5, 14, 31):
        assert run_jobs(runner, [changed_jobs()[index]], Schedule(depth=2)) == [expected[index]]
        runner.clear()


class NewTokens:
    """No token twice. Checks that it knows all tokens of its rows."""

    needs_token_ids = True

    def __init__(self, context: ProcessorContext) -> None:
        self._tokens: dict[int, list[int]] = {}

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        if "new_tokens" in params.processor_args:
            self._tokens[row] = token_ids[num_prompt_tokens:].tolist()
        return row in self._tokens

    def release(self, row: int) -> None:
        del self._tokens[row]

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        for row, token in zip(rows.tolist(), token_ids.numpy()[lines].tolist(), strict=True):
            assert token not in self._tokens[row]
            self._tokens[row].append(token)

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        for line, row in zip(lines.tolist(), rows.tolist(), strict=True):
            logits[line, self._tokens[row]] = float("-inf")


_OWN = {"new_tokens": NewTokens}


def jobs_with_new_tokens() -> list[Job]:
    """Every third of them: with a bias that would repeat a token, and with penalties."""
    bias = LogitsParams(
        bias_token_ids=np.array([4]),
        biases=np.array([100], np.float32),
        frequency_penalty=1.0,
        processor_args={"new_tokens": True},
    )
    changed = changed_jobs()
    for job in changed[::3]:
        job.params = bias
    return changed


@pytest.mark.parametrize(
    "how",
    [Schedule(), Schedule(depth=2), Schedule(chunk=3, depth=3), Schedule(num_rounds=4, depth=2)],
    ids=str,
)
def test_a_processor_has_all_tokens_on_the_host(
    how: Schedule, loaded: LoadedRunner, expected: list[list[int]]
) -> None:
    runner = MultiStepRunner(pipelined(loaded, HostCapturer(), own=_OWN))
    found = run_jobs(runner, jobs_with_new_tokens(), how)
    runner.clear()
    for index, (tokens, before) in enumerate(zip(found, expected, strict=True)):
        if index % 3:
            assert tokens == before
        else:
            assert tokens[0] == 4
            assert len(set(tokens)) == NUM_OUTPUT


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_launch_waits_for_tokens_behind_its_forward_pass_if_at_all(
    has_rows: bool, loaded: LoadedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = pipelined(loaded, own=_OWN)
    events: list[str] = []
    launch, arrays = DeviceForward.launch, HostCopies.arrays

    def noted_launch(self: DeviceForward, *arguments: Any) -> Tensor:
        events.append("forward")
        return launch(self, *arguments)

    def noted_arrays(self: HostCopies) -> Any:
        events.append("tokens")
        return arrays(self)

    monkeypatch.setattr(DeviceForward, "launch", noted_launch)
    monkeypatch.setattr(HostCopies, "arrays", noted_arrays)
    [job] = jobs_with_new_tokens()[:1] if has_rows else changed_jobs()[1:2]
    # Read behind the last launch, apart from what a processor needs.
    run_jobs(runner, [replace(job, num_output=3)], Schedule(depth=9))
    runner.clear()
    launched = (
        ["forward", "forward", "tokens", "forward", "tokens"] if has_rows else ["forward"] * 3
    )
    assert events[: len(launched)] == launched
    assert set(events[len(launched) :]) == {"tokens"}
