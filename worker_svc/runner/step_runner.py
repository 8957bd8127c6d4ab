"""The interface between an Execute stream and the runner of its plans."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

from worker_svc.plan.plans import Plan, StepOutput

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Callback = Callable[[], object]


class PendingOutput(Protocol[T_co]):
    """Work that was launched on the device and may still be running."""

    def is_ready(self) -> bool:
        """Whether `output` would return at once."""
        ...

    def output(self) -> T_co:
        """Wait for the end and raise the error, if any. To be called once, in launch order."""
        ...


@dataclass(frozen=True)
class ReadyOutput(Generic[T]):
    """Work that has already finished."""

    value: T

    def is_ready(self) -> bool:
        return True

    def output(self) -> T:
        return self.value


@dataclass(frozen=True)
class Failed:
    """Work that failed to launch; `output` raises the error."""

    error: BaseException

    def is_ready(self) -> bool:
        return True

    def output(self) -> NoReturn:
        raise self.error


def no_op(*_: object) -> None:
    """The default of callbacks."""


class StepRunner(Protocol):
    """Runs plans, one after another, on one thread."""

    @property
    def last_finished_step(self) -> int:
        """0 before the first; read by other threads."""
        ...

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        """Start a step. The next one may be launched before the output of this one is read. An
        error of either leaves rows undefined until `clear`; blocks stay usable.

        `before_blocking` is called just before each part of the step that releases the interpreter
        and waits for the device: threads that it wakes do not delay the step.
        """
        ...

    def clear(self) -> None:
        """Release all rows after the last launched step; blocks keep their contents."""
        ...


@dataclass(frozen=True)
class Identity:
    """Properties of a worker, fixed once its model is loaded. Fields are those of `Hello`."""

    model_fingerprint: bytes
    block_size: int
    num_blocks: int  # the null block included
    num_host_blocks: int
    kv_cache_dtype: str
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0  # the most drafts of a row in a step
    num_stages: int = 1  # that run passes of different rows side by side


@dataclass(frozen=True)
class LoadedRunner:
    """A runner and its properties."""

    runner: StepRunner
    identity: Identity
    # Called on the event loop when a plan arrives, which may be long before it is launched.
    on_arrival: Callable[[Plan], object] = no_op
    # To be called after the last plan.
    close: Callable[[], object] = no_op
