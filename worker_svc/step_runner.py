"""What a lane asks of the thing that runs its plans."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

from worker_svc.plans import Plan, StepOutput

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Launched(Protocol[T_co]):
    """Work that was handed to the device, which may still be at it."""

    def is_ready(self) -> bool:
        """Whether `output` would not wait."""
        ...

    def output(self) -> T_co:
        """Waits for the end; raises what went wrong. To be called once, in the launches' order."""
        ...


@dataclass(frozen=True)
class Finished(Generic[T]):
    """Work that was over when it was handed on."""

    value: T

    def is_ready(self) -> bool:
        return True

    def output(self) -> T:
        return self.value


@dataclass(frozen=True)
class Failed:
    """Work that could not be begun; its turn to say so comes with its result."""

    error: BaseException

    def is_ready(self) -> bool:
        return True

    def output(self) -> NoReturn:
        raise self.error


def nothing() -> None:
    """What there is to do meanwhile, mostly."""


class StepRunner(Protocol):
    """Runs plans, one after the other, on one thread."""

    @property
    def last_finished_step(self) -> int:
        """0 before the first; read by other threads."""
        ...

    def launch(self, plan: Plan, meanwhile: Callable[[], object] = nothing) -> Launched[StepOutput]:
        """Begins a step. The next one may be launched before its output is asked for. An error,
        here or there, leaves rows undefined until `clear`; blocks stay usable.

        `meanwhile` is called when work of the step is about to run without the interpreter, if
        there is any: what it wakes does not hold the step up.
        """
        ...

    def run(self, plan: Plan) -> StepOutput:
        """Runs one plan to its end."""
        ...

    def clear(self) -> None:
        """Drops all rows; blocks keep their contents. Launched steps have ended when it returns."""
        ...
