"""What a lane has done so far: plain counters that its loop increments and others read.

Metrics, the status page and the benchmarks take differences of them; the loop pays an addition.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class LaneStats:
    """Everything counts from the lane's opening."""

    num_steps: int = 0
    # Tokens that plans scheduled: of prompts (recomputed ones included) and in all.
    num_prefill_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_sampled_tokens: int = 0
    # Tokens of admitted sequences, and how many of them the prefix cache had.
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    # The same of sequences that had begun before their lane or their leader was lost.
    num_recovered_tokens: int = 0
    num_recovered_hit_tokens: int = 0
    num_preempted_by_recompute: int = 0
    num_preempted_by_swap: int = 0
    # Calls of Redis, and seconds waited for them.
    num_redis_calls: int = 0
    redis_s: float = 0.0
    # Seconds of the loop's own work: deciding, packing, building plans, taking results.
    scheduling_s: float = 0.0
    # As the worker told them.
    worker_idle_ns: int = 0
    worker_busy_ns: int = 0
    # Of the idle time: with the next plan there already.
    worker_starting_ns: int = 0


@dataclass(slots=True)
class EngineStats:
    """Everything counts from the start of the leadership."""

    num_accepted: int = 0
    num_refused: int = 0
    # Sequences whose lanes were lost.
    num_recovered: int = 0
    # Ended choices by reason: "stop_token", "length", "stop_string", or a gRPC code in lower case.
    ended: dict[str, int] = field(default_factory=dict)

    def end(self, reason: str) -> None:
        self.ended[reason] = self.ended.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of one lane."""

    # The worker's incarnation.
    worker: int
    # The loop's own work.
    scheduling_s: float
    # Waiting for Redis.
    redis_s: float
    # From the plan's sending to its result.
    step_s: float
    num_scheduled_tokens: int
