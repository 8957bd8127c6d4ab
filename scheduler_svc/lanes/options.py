"""What lanes are given: the settings that concern them, and whom they tell."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import StepSample
from scheduler_svc.core.view import Limits
from scheduler_svc.lanes.stream import Worker


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """The same for every lane."""

    # The most that the settings allow; block size and watermark come from the worker.
    limits: Limits
    # Share of a pool's blocks that new requests leave free.
    watermark: float
    # Plans in flight.
    depth: int
    enable_prefix_caching: bool
    check_every_step: bool
    # What a plan of several rounds may take, far below the step's timeout; 0: no plan has several,
    # and an idle lane waits for nobody.
    multi_step_s: float
    # A worker that has a plan for longer is stuck.
    step_timeout_s: float

    def limits_for(self, worker: Worker) -> Limits:
        most = self.limits
        return replace(
            most,
            block_size=worker.block_size,
            max_num_batched_tokens=min(most.max_num_batched_tokens, worker.max_num_batched_tokens),
            max_num_seqs=min(most.max_num_seqs, worker.max_num_seqs),
            watermark=int(self.watermark * worker.num_blocks),
            max_model_len=worker.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class LaneHooks:
    """Whom a lane tells what."""

    # A sequence is over and holds nothing any more.
    left: Callable[[Sequence], None]
    # Another lane than that of this worker takes requests.
    others_open: Callable[[int], bool]
    # Seconds since a request came, for whatever lane.
    quiet_s: Callable[[], float]
    # Somebody is in the queue.
    somebody_waits: Callable[[], bool]
    # Returns when something may be sent: at once while the lead is held for certain.
    may_send: Callable[[], Awaitable[None]]
    # These have to wait for a row again, here or elsewhere.
    given_back: Callable[[list[Sequence]], None]
    # There may be room for others.
    room: Callable[[], None]
    # A plan has returned.
    stepped: Callable[[StepSample], None]
    # Brings request records up to what is journaled of these.
    fold: Callable[[list[Sequence]], Awaitable[None]]
