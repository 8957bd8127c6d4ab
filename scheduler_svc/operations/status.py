"""The status as a message."""

from collections.abc import Mapping
from typing import Final

from quire.internal.v1 import operations_pb2
from scheduler_svc.operations.views import EngineView, LaneView

# In a block map: free, and a prefix may still be found in it.
CACHED: Final = 2


def status_of(
    engine: EngineView, epoch: int, uptime_s: float, block_maps: Mapping[int, bytes]
) -> operations_pb2.GetStatusResponse:
    """Workers whose block map is not there are told of without."""
    return operations_pb2.GetStatusResponse(
        epoch=epoch,
        uptime_ms=round(uptime_s * 1000),
        queue=operations_pb2.QueueStatus(
            num_requests=len(engine.waiting), num_tokens=engine.waiting.num_tokens
        ),
        num_accepted=engine.stats.num_accepted,
        num_refused=engine.stats.num_refused,
        workers=[
            _worker(lane, block_maps.get(incarnation))
            for incarnation, lane in sorted(engine.lanes.items())
        ],
    )


def _worker(lane: LaneView, kinds: bytes | None) -> operations_pb2.WorkerStatus:
    stats = lane.stats
    return operations_pb2.WorkerStatus(
        incarnation=lane.worker.incarnation,
        address=lane.address,
        draining=lane.draining,
        num_running=len(lane.rows),
        num_assigned=len(lane.assigned),
        num_swapped=lane.num_swapped,
        num_steps=stats.num_steps,
        num_scheduled_tokens=stats.num_scheduled_tokens,
        num_sampled_tokens=stats.num_sampled_tokens,
        num_queried_tokens=stats.num_queried_tokens,
        num_hit_tokens=stats.num_hit_tokens,
        num_recovered_tokens=stats.num_recovered_tokens,
        num_recovered_hit_tokens=stats.num_recovered_hit_tokens,
        num_preempted_by_recompute=stats.num_preempted_by_recompute,
        num_preempted_by_swap=stats.num_preempted_by_swap,
        idle_ns=stats.worker_idle_ns,
        busy_ns=stats.worker_busy_ns,
        starting_ns=stats.worker_starting_ns,
        num_blocks=lane.worker.num_blocks - 1,
        num_free_blocks=lane.num_free_blocks,
        num_cached_blocks=kinds.count(CACHED) if kinds else None,
        block_map=kinds or b"",
    )
