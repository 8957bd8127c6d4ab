"""Runs plans of different rows side by side, one in each stage of a model."""

from collections import deque
from dataclasses import dataclass, field

from worker_svc.plan.plans import Plan, StepOutput
from worker_svc.runner.runner import BegunStep, Runner
from worker_svc.runner.step_runner import Callback, Failed, PendingOutput, ReadyOutput, no_op


class StagedRunner:
    """A runner whose steps begin before earlier ones have ended. A plan that changes or runs rows
    of such a step waits for it, so any sequence of plans has the results that it has on a
    `Runner`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._running: deque[_RunningStep] = deque()

    @property
    def last_finished_step(self) -> int:
        return self._runner.last_finished_step

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        """Run the first stage. `before_blocking` is called as in `Runner`."""
        changed = rows_of(plan)
        if any(not step.rows.isdisjoint(changed) for step in self._running):
            before_blocking()
            while any(not step.rows.isdisjoint(changed) for step in self._running):
                self._end_oldest()
        step = _RunningStep(self, self._runner.begin(plan, before_blocking), frozenset(changed))
        self._running.append(step)
        return step

    def clear(self) -> None:
        while self._running:
            # Its logits are still sent.
            begun = self._running.popleft().begun
            if begun.logits is not None:
                begun.logits.result()
        self._runner.clear()

    def end(self, step: "_RunningStep") -> None:
        """End this step, and those before it."""
        while step.ended is None:
            self._end_oldest()

    def _end_oldest(self) -> None:
        step = self._running.popleft()
        try:
            step.ended = ReadyOutput(self._runner.end(step.begun))
        except Exception as error:
            step.ended = Failed(error)


@dataclass(eq=False)
class _RunningStep:
    """A step that has begun."""

    runner: StagedRunner
    begun: BegunStep
    rows: frozenset[int]  # that it runs or changes
    ended: PendingOutput[StepOutput] | None = field(default=None, init=False)

    def is_ready(self) -> bool:
        return self.ended is not None or self.begun.has_logits

    def output(self) -> StepOutput:
        self.runner.end(self)
        assert self.ended is not None
        return self.ended.output()


def rows_of(plan: Plan) -> set[int]:
    """The rows that a plan runs or changes."""
    return {
        *plan.released_rows.tolist(),
        *(admission.row for admission in plan.admissions),
        *plan.appends.rows.tolist(),
        *plan.rows.tolist(),
    }
