"""What a lane asks of the thing that runs its plans."""

from typing import Protocol

from worker_svc.plans import Plan, StepOutput


class StepRunner(Protocol):
    """Runs plans, one after the other, on one thread."""

    @property
    def last_finished_step(self) -> int:
        """0 before the first; read by other threads."""
        ...

    def run(self, plan: Plan) -> StepOutput:
        """Runs one plan. An error leaves rows undefined until `clear`; blocks stay usable."""
        ...

    def clear(self) -> None:
        """Drops all rows; blocks keep their contents."""
        ...
