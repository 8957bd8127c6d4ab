"""Multi-step decoding: a plan of several rounds, run as one step of the runner per round."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from worker_svc.plan.draft_counts import added_up
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.plans import Plan, StepOutput, StepTimes
from worker_svc.runner.step_runner import Callback, PendingOutput, StepRunner, no_op

T = TypeVar("T")


class MultiStepRunner:
    """Runs the rounds of a plan on another runner and joins their outputs."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner

    @property
    def last_finished_step(self) -> int:
        """The last step of which at least the first round has finished."""
        return self.runner.last_finished_step

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        """Launch a plan, round by round; the runner calls `before_blocking` in each round."""
        if not len(plan.num_rounds):
            return self.runner.launch(plan, before_blocking)
        return _Rounds([self.runner.launch(each, before_blocking) for each in plan.rounds()])

    def clear(self) -> None:
        self.runner.clear()


@dataclass(frozen=True)
class _Rounds:
    """The launched rounds of one plan."""

    launched: list[PendingOutput[StepOutput]]

    def is_ready(self) -> bool:
        return self.launched[-1].is_ready()

    def output(self) -> StepOutput:
        outputs = [each.output() for each in self.launched]
        return StepOutput(
            sampled_rows=_concatenate(output.sampled_rows for output in outputs),
            sampled_token_ids=_concatenate(output.sampled_token_ids for output in outputs),
            times=sum((output.times for output in outputs), StepTimes()),
            logprobs=Logprobs.join(
                [len(output.sampled_rows) for output in outputs],
                [output.logprobs for output in outputs],
            ),
            failures=dict(_concatenate(output.failures.items() for output in outputs)),
            # Only the first round may compute prompt tokens.
            prompt_logprobs=outputs[0].prompt_logprobs,
            **_last_counts(outputs),
            forced_indices=_joined_indices(outputs),
            round_sizes=[len(output.sampled_rows) for output in outputs],
            num_draft_tokens=added_up(output.num_draft_tokens for output in outputs),
            num_accepted_tokens=added_up(output.num_accepted_tokens for output in outputs),
        )


def _last_counts(outputs: Iterable[StepOutput]) -> dict[str, list[int]]:
    """Rows with look-ahead, and their computed tokens after the last round of each."""
    counts: dict[int, int] = {}
    for output in outputs:
        counts.update(zip(output.lookahead_rows, output.num_computed_tokens, strict=True))
    return {"lookahead_rows": list(counts), "num_computed_tokens": list(counts.values())}


def _joined_indices(outputs: Iterable[StepOutput]) -> list[int]:
    indices, num_before = [], 0
    for output in outputs:
        indices += [num_before + index for index in output.forced_indices]
        num_before += len(output.sampled_rows)
    return indices


def _concatenate(lists: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(lists))
