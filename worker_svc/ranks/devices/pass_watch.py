"""Notices steps that do not end: a GPU that waits for another rank waits for ever."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

from worker_svc.plan.plans import Plan, StepOutput
from worker_svc.runner.step_runner import Callback, PendingOutput, StepRunner, no_op

_INTERVAL_S: Final = 1.0
# As for a wait within a pass on CPUs.
_TIMEOUT_S: Final = 60.0


class PassWatch:
    """Watches steps from their launch to their output, on another thread. Time is counted there, so
    that a process which was stopped does not count the time that it has not run."""

    def __init__(
        self,
        on_lost: Callable[[str], object],
        timeout_s: float = _TIMEOUT_S,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """`on_lost` is called with the reason, once."""
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._numbers = count()
        self._ages_s: dict[int, float] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="passes", daemon=True).start()

    def begin(self) -> int:
        """A step is launched. Returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._ages_s[number] = 0
        return number

    def end(self, number: int) -> None:
        with self._lock:
            self._ages_s.pop(number, None)

    def forget(self) -> None:
        """Of steps that were launched, but whose outputs will not be read."""
        with self._lock:
            self._ages_s.clear()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            with self._lock:
                for number in self._ages_s:
                    self._ages_s[number] += self._interval_s
                oldest_s = max(self._ages_s.values(), default=0)
            if oldest_s > self._timeout_s:
                self._stopped.set()
                self._on_lost(f"a step has not ended for {oldest_s:.1f} s")


class WatchedRunner:
    """A runner whose steps are watched."""

    def __init__(self, runner: StepRunner, watch: PassWatch) -> None:
        self.runner = runner
        self._watch = watch

    @property
    def last_finished_step(self) -> int:
        return self.runner.last_finished_step

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        number = self._watch.begin()
        try:
            launched = self.runner.launch(plan, before_blocking)
        except BaseException:
            # Outputs of the earlier rounds of a plan are not read either.
            self._watch.forget()
            raise
        return _WatchedStep(launched, self._watch, number)

    def clear(self) -> None:
        self._watch.begin()
        try:
            self.runner.clear()
        finally:
            self._watch.forget()


@dataclass(frozen=True)
class _WatchedStep:
    launched: PendingOutput[StepOutput]
    watch: PassWatch
    number: int

    def is_ready(self) -> bool:
        return self.launched.is_ready()

    def output(self) -> StepOutput:
        try:
            output = self.launched.output()
        except BaseException:
            self.watch.forget()
            raise
        self.watch.end(self.number)
        return output
