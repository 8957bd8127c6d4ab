"""Counts the steps of a lane, and sends their plans."""

import time
from dataclasses import dataclass

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.lane.batch_window import BatchWindow
from scheduler_svc.lane.in_flight import InFlightStep, InFlightSteps, ScheduledRows
from scheduler_svc.lane.worker_stream import WorkerStream


@dataclass(frozen=True, slots=True)
class StepSender:
    """The end of a step, in the loop and in the steady state."""

    epoch: int
    stream: WorkerStream
    in_flight: InFlightSteps
    batch_window: BatchWindow
    stats: LaneStats

    def count(
        self,
        number: int,
        scheduled: ScheduledRows,
        num_tokens: int,
        num_prefill_tokens: int,
        num_rounds: int,
        scheduling_s: float,
        redis_s: float,
    ) -> InFlightStep:
        """Count a committed step, and return it as it is about to be sent."""
        stats = self.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += num_tokens
        stats.num_prefill_tokens += num_prefill_tokens
        stats.scheduling_s += scheduling_s
        return InFlightStep(
            epoch=self.epoch,
            step=number,
            scheduled=scheduled,
            num_tokens=num_tokens,
            num_prefill_tokens=num_prefill_tokens,
            num_rounds=num_rounds,
            sent_at=time.perf_counter(),
            scheduling_s=scheduling_s,
            redis_s=redis_s,
        )

    def send(self, step: InFlightStep, request: worker_pb2.ExecuteRequest) -> None:
        """Send the plan of a step. LaneLost if the stream has ended."""
        self.in_flight.add(step)
        if step.scheduled.sequences:
            # Of a window only the first plan counts. The steady state begins with rows in flight,
            # so it never sends that one.
            self.batch_window.sent(step.step)
        self.stream.send(request)
