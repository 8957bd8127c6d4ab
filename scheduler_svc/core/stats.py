"""Counters that lanes and the engine increment.

Metrics, `quire status` and the benchmarks read differences of them.
"""

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.core.queue_times import QueueTimes


@dataclass(slots=True)
class LaneStats:
    """Totals since the lane opened."""

    num_steps: int = 0
    # Tokens that plans scheduled: of prompts (recomputed ones included), and all.
    num_prefill_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_sampled_tokens: int = 0
    # The sampled tokens that jumps have added.
    num_forced_tokens: int = 0
    # Tokens that speculation has proposed, and those of them that were sampled, too, by their
    # position behind the last token of a row, from 0.
    draft_tokens: Counter[int] = field(default_factory=Counter)
    accepted_tokens: Counter[int] = field(default_factory=Counter)
    # Tokens of admitted sequences, and how many of them the prefix cache held.
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    # The same for sequences that had run before their lane or leader was lost.
    num_recovered_tokens: int = 0
    num_recovered_hit_tokens: int = 0
    num_preempted_by_recompute: int = 0
    num_preempted_by_swap: int = 0
    # Redis calls, and seconds spent on them, packing included.
    num_redis_calls: int = 0
    redis_s: float = 0.0
    # Seconds of the loop's own work: deciding, delivering, completing; without building plans.
    scheduling_s: float = 0.0
    # As reported by the worker.
    worker_idle_ns: int = 0
    worker_busy_ns: int = 0
    # The part of the idle time in which the next plan had arrived already.
    worker_starting_ns: int = 0

    @property
    def num_row_steps(self) -> int:
        """Tokens that were neither forced nor sampled behind an accepted draft: one for each row
        and step."""
        return self.num_sampled_tokens - self.num_forced_tokens - self.accepted_tokens.total()


@dataclass(slots=True)
class TenantStats:
    """Totals of one principal since the start of the leadership term."""

    num_accepted: int = 0
    # Refused requests by the error's reason.
    refused: Counter[str] = field(default_factory=Counter)
    # Of accepted requests, and sampled for them, tokens sampled again not counted.
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(slots=True)
class EngineStats:
    """Totals since the start of the leadership term."""

    num_accepted: int = 0
    num_refused: int = 0
    # By principal.
    tenants: dict[str, TenantStats] = field(default_factory=dict)
    # Sequences requeued because their lane was lost.
    num_recovered: int = 0
    # Ended choices by reason: "stop_token", "length", "stop_string", or a gRPC code in lower case.
    ended: dict[str, int] = field(default_factory=dict)
    queue_times: QueueTimes = field(default_factory=QueueTimes)

    def of(self, principal: str) -> TenantStats:
        """The totals of a principal."""
        tenant = self.tenants.get(principal)
        if tenant is None:
            tenant = self.tenants[principal] = TenantStats()
        return tenant

    def accept(self, principal: str, num_prompt_tokens: int) -> None:
        self.num_accepted += 1
        tenant = self.of(principal)
        tenant.num_accepted += 1
        tenant.num_prompt_tokens += num_prompt_tokens

    def refuse(self, principal: str, reason: str) -> None:
        self.num_refused += 1
        self.of(principal).refused[reason] += 1

    def end(self, reason: str) -> None:
        self.ended[reason] = self.ended.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step of one lane."""

    worker_incarnation: int
    # The loop's own work before the plan's message is built.
    scheduling_s: float
    # Time spent on Redis calls, packing included.
    redis_s: float
    # From sending the plan to its result.
    step_s: float
    num_scheduled_tokens: int
