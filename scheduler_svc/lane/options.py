"""A lane's settings, and its callbacks into the engine."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import StepTiming
from scheduler_svc.core.view import Limits, Policy, PreemptionMode
from scheduler_svc.lane.worker_stream import WorkerInfo


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """The same for every lane."""

    # Upper bounds: a worker may allow less.
    max_num_batched_tokens: int
    max_num_seqs: int
    # Share of a pool's blocks that new requests must leave free.
    watermark_share: float
    # As in `Limits`.
    policy: Policy
    preemption_mode: PreemptionMode
    max_num_partial_prefills: int | None
    max_long_partial_prefills: int | None
    long_prefill_token_threshold: int
    num_lookahead_slots: int
    # Maximum number of plans in flight; a worker with more stages has one in each.
    pipeline_depth: int
    enable_prefix_caching: bool
    check_every_step: bool
    # Maximum duration of a plan of several rounds; 0: one round per plan, and no batch window.
    multi_step_s: float
    # Intended duration of a step that computes prompts beside decodes; 0: any.
    max_prefill_s: float
    # A worker whose oldest plan takes longer counts as stuck.
    step_timeout_s: float

    def limits_for(self, worker: WorkerInfo) -> Limits:
        """The limits of a worker's lane."""
        return Limits(
            block_size=worker.block_size,
            max_num_batched_tokens=min(self.max_num_batched_tokens, worker.max_num_batched_tokens),
            max_num_seqs=min(self.max_num_seqs, worker.max_num_seqs),
            watermark=int(self.watermark_share * worker.num_blocks),
            policy=self.policy,
            preemption_mode=self.preemption_mode,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            num_lookahead_slots=self.num_lookahead_slots,
            max_model_len=worker.max_model_len,
        )

    def pipeline_depth_for(self, worker: WorkerInfo) -> int:
        """Plans in flight: at least one in each stage."""
        return max(self.pipeline_depth, worker.num_stages)

    def max_rounds_s(self, worker: WorkerInfo) -> float:
        """Maximum duration of a plan of several rounds: all plans in flight together stay far below
        the step timeout."""
        return min(self.multi_step_s, self.step_timeout_s / (4 * self.pipeline_depth_for(worker)))

    def num_micro_batches_for(self, worker: WorkerInfo) -> int:
        """Plans in flight with different rows, among which the decodes are divided."""
        return self.pipeline_depth_for(worker) if worker.num_stages > 1 else 1


@dataclass(frozen=True, slots=True)
class LaneHooks:
    """Callbacks of a lane."""

    # A sequence has ended and holds no resources.
    sequence_finished: Callable[[Sequence], None]
    # Whether another lane than that of this worker accepts requests.
    has_other_lane: Callable[[int], bool]
    # Seconds since the last arrival at any lane.
    since_last_arrival_s: Callable[[], float]
    # Whether the engine's queue is not empty.
    has_waiting: Callable[[], bool]
    # Whether a plan may be sent now: the lease is held for certain.
    may_send: Callable[[], bool]
    # Returns once a plan may be sent: at once while the lease is held for certain.
    wait_for_lease: Callable[[], Awaitable[None]]
    # Another leader has opened a lane to the worker.
    lane_taken: Callable[[], None]
    # These sequences wait for a row again, on any lane.
    requeue: Callable[[list[Sequence]], None]
    # Capacity may have become free.
    capacity_freed: Callable[[], None]
    # A plan has completed.
    step_completed: Callable[[StepTiming], None]
    # Writes journaled tokens of these sequences to their records.
    compact: Callable[[list[Sequence]], Awaitable[None]]
