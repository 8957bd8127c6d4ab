"""Plans of several rounds, as steps of the runner that knows none."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from worker_svc.logprobs import Logprobs
from worker_svc.plans import Plan, StepOutput, StepTimes
from worker_svc.step_runner import Launched, StepRunner, nothing

T = TypeVar("T")


class RoundsRunner:
    """Runs a plan as often as it says, on another runner, and gathers what its rounds gave."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner

    @property
    def last_finished_step(self) -> int:
        """One of several rounds counts from its first one on."""
        return self.runner.last_finished_step

    def launch(self, plan: Plan, meanwhile: Callable[[], object] = nothing) -> Launched[StepOutput]:
        if not len(plan.num_rounds):
            return self.runner.launch(plan, meanwhile)
        return _Rounds([self.runner.launch(each, meanwhile) for each in plan.rounds()])

    def run(self, plan: Plan) -> StepOutput:
        return self.launch(plan).output()

    def clear(self) -> None:
        self.runner.clear()


@dataclass(frozen=True)
class _Rounds:
    """The rounds of one plan, launched."""

    launched: list[Launched[StepOutput]]

    def is_ready(self) -> bool:
        return self.launched[-1].is_ready()

    def output(self) -> StepOutput:
        outputs = [each.output() for each in self.launched]
        return StepOutput(
            sampled_rows=_joined(output.sampled_rows for output in outputs),
            sampled_token_ids=_joined(output.sampled_token_ids for output in outputs),
            times=_sum([output.times for output in outputs]),
            logprobs=Logprobs.join(
                [len(output.sampled_rows) for output in outputs],
                [output.logprobs for output in outputs],
            ),
            failures=dict(_joined(output.failures.items() for output in outputs)),
        )


def _joined(lists: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def _sum(times: list[StepTimes]) -> StepTimes:
    return StepTimes(
        waiting_ns=sum(each.waiting_ns for each in times),
        preparing_ns=sum(each.preparing_ns for each in times),
        forward_ns=sum(each.forward_ns for each in times),
        sampling_ns=sum(each.sampling_ns for each in times),
        starting_ns=sum(each.starting_ns for each in times),
    )
