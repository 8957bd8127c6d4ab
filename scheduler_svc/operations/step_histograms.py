"""Histograms of step times, by worker."""

from collections.abc import Iterable

from quire.service.metrics.histogram import Histogram
from scheduler_svc.core.stats import StepTiming

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04),
    *(0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.0, 60.0),
)
TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))


class WorkerHistograms:
    """The steps of one worker."""

    def __init__(self) -> None:
        self.step_s = Histogram(SECONDS)
        self.scheduling_s = Histogram(SECONDS)
        self.redis_s = Histogram(SECONDS)
        self.num_scheduled_tokens = Histogram(TOKENS)


class StepHistograms:
    """Collects the timings of all lanes. A timing costs its lane about a microsecond."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerHistograms] = {}

    def observe(self, timing: StepTiming) -> None:
        histograms = self._workers.get(timing.worker_incarnation)
        if histograms is None:
            histograms = self._workers[timing.worker_incarnation] = WorkerHistograms()
        histograms.step_s.observe(timing.step_s)
        histograms.scheduling_s.observe(timing.scheduling_s)
        histograms.redis_s.observe(timing.redis_s)
        histograms.num_scheduled_tokens.observe(timing.num_scheduled_tokens)

    def of(self, workers: Iterable[int]) -> dict[int, WorkerHistograms]:
        """The histograms of these workers; those of other workers are dropped."""
        self._workers = {w: self._workers.get(w) or WorkerHistograms() for w in workers}
        return dict(self._workers)
