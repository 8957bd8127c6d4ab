"""`OperationsService`: status and commands for operators."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
import structlog

from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.service.errors import abort, unavailable
from scheduler_svc.engine.engine import Engine
from scheduler_svc.gateway.servicer import standby_error
from scheduler_svc.lane.lane import Lane
from scheduler_svc.operations.block_maps import BlockMaps
from scheduler_svc.store.errors import StoreError

log = structlog.get_logger()

# In a block map: a free block with a cached prefix.
_CACHED: Final = 2

_Context = grpc.aio.ServicerContext[Any, Any]


class OperationsServicer(operations_pb2_grpc.OperationsServiceServicer):
    """Without an engine, while this scheduler does not lead, it refuses every call."""

    def __init__(self, leader_address: Callable[[], str]) -> None:
        """`leader_address` returns an empty string while the leader is unknown."""
        self._leader_address = leader_address
        self._engine: Engine | None = None
        self._epoch = 0
        self._maps = BlockMaps()
        self._started_s = time.monotonic()

    def start_leading(self, engine: Engine, epoch: int) -> None:
        """Serve calls for this engine."""
        self._engine, self._epoch = engine, epoch

    def stop_leading(self) -> None:
        """Refuse calls: this scheduler no longer leads."""
        self._engine = None

    async def GetStatus(  # noqa: N802
        self, request: operations_pb2.GetStatusRequest, context: _Context
    ) -> operations_pb2.GetStatusResponse:
        engine = await self._served(context)
        maps = await self._maps.of(dict(engine.lanes)) if request.with_block_maps else {}
        return _status_of(engine, self._epoch, time.monotonic() - self._started_s, maps)

    async def ResetPrefixCache(  # noqa: N802
        self, request: operations_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> operations_pb2.ResetPrefixCacheResponse:
        engine = await self._served(context)
        lanes = list(engine.lanes.values())
        try:
            counts = await asyncio.gather(*(lane.reset_prefix_cache() for lane in lanes))
        except StoreError as error:
            await abort(context, unavailable("STORE_FAILED", f"not all caches are reset: {error}"))
        log.info("prefix caches reset", workers=len(lanes), blocks=sum(counts))
        return operations_pb2.ResetPrefixCacheResponse(num_blocks=sum(counts))

    async def _served(self, context: _Context) -> Engine:
        if self._engine is None:
            await abort(context, standby_error(self._leader_address()))
        return self._engine


def _status_of(
    engine: Engine, epoch: int, uptime_s: float, block_maps: Mapping[int, bytes]
) -> operations_pb2.GetStatusResponse:
    """Build the status; workers missing in `block_maps` are reported without a map."""
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
        refused_workers=[
            operations_pb2.RefusedWorker(address=address, reason=reason)
            for address, reason in sorted(engine.refused_workers.items())
        ],
    )


def _worker(lane: Lane, kinds: bytes | None) -> operations_pb2.WorkerStatus:
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
        num_forced_tokens=stats.num_forced_tokens,
        num_draft_tokens=_by_position(stats.draft_tokens),
        num_accepted_tokens=_by_position(stats.accepted_tokens),
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
        num_cached_blocks=kinds.count(_CACHED) if kinds else None,
        block_map=kinds or b"",
    )


def _by_position(counts: Counter[int]) -> list[int]:
    return [counts[position] for position in range(max(counts, default=-1) + 1)]
