"""`OperationsService`: status and commands for operators."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog

from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.service.errors import abort, invalid, unavailable
from scheduler_svc.cluster.cluster_map import MAX_SHARDS
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.engine.engine import Engine
from scheduler_svc.gateway.servicer import standby_error
from scheduler_svc.lane.lane import Lane
from scheduler_svc.operations.block_maps import BlockMaps
from scheduler_svc.store.errors import StoreError

log = structlog.get_logger()

# In a block map: a free block with a cached prefix.
_CACHED: Final = 2

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class LedShard:
    """A shard that this process leads."""

    engine: Engine
    epoch: int
    # Raises the number of shards to this one; None unless it is shard 0. Raises StoreError.
    add_shards: Callable[[int], Awaitable[None]] | None = None


class OperationsServicer(operations_pb2_grpc.OperationsServiceServicer):
    """A call about a shard that this process does not lead is refused."""

    def __init__(
        self,
        led_shard: Callable[[int], LedShard | None],
        leader_address: Callable[[int], str],
        membership: Callable[[], Membership | None],
    ) -> None:
        """`led_shard` returns None for a shard that this process does not lead; `leader_address`
        an empty string while the leader of a shard is unknown; `membership` None before the
        start."""
        self._led_shard = led_shard
        self._leader_address = leader_address
        self._membership = membership
        self._maps = BlockMaps()
        self._started_s = time.monotonic()

    async def GetStatus(  # noqa: N802
        self, request: operations_pb2.GetStatusRequest, context: _Context
    ) -> operations_pb2.GetStatusResponse:
        led = await self._led(request.shard, context)
        maps = await self._maps.of(dict(led.engine.lanes)) if request.with_block_maps else {}
        return _status_of(led.engine, led.epoch, time.monotonic() - self._started_s, maps)

    async def ResetPrefixCache(  # noqa: N802
        self, request: operations_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> operations_pb2.ResetPrefixCacheResponse:
        led = await self._led(request.shard, context)
        lanes = list(led.engine.lanes.values())
        try:
            counts = await asyncio.gather(*(lane.reset_prefix_cache() for lane in lanes))
        except StoreError as error:
            await abort(context, unavailable("STORE_FAILED", f"not all caches are reset: {error}"))
        log.info("prefix caches reset", workers=len(lanes), blocks=sum(counts))
        return operations_pb2.ResetPrefixCacheResponse(num_blocks=sum(counts))

    async def GetCluster(  # noqa: N802
        self, request: operations_pb2.GetClusterRequest, context: _Context
    ) -> operations_pb2.GetClusterResponse:
        membership = self._membership()
        if membership is None or not membership.is_known.is_set():
            why = None if membership is None else membership.problem
            why = why or "the scheduler has not reached Redis"
            await abort(context, unavailable("REDIS_AWAY", why))
        return _cluster_of(membership)

    async def SetNumShards(  # noqa: N802
        self, request: operations_pb2.SetNumShardsRequest, context: _Context
    ) -> operations_pb2.SetNumShardsResponse:
        led = await self._led(0, context)
        membership = self._membership()
        assert led.add_shards is not None
        assert membership is not None
        present = membership.map.num_shards
        if not present <= request.num_shards <= MAX_SHARDS:
            limits = f"from {present}, the present number, to {MAX_SHARDS}"
            message = f"must be {limits} (got {request.num_shards})"
            await abort(context, invalid("num_shards", "NUM_SHARDS_OUT_OF_RANGE", message))
        try:
            await led.add_shards(request.num_shards)
        except StoreError as error:
            await abort(context, unavailable("STORE_FAILED", f"the number is not changed: {error}"))
        return operations_pb2.SetNumShardsResponse()

    async def _led(self, shard: int, context: _Context) -> LedShard:
        led = self._led_shard(shard)
        if led is None:
            await abort(context, standby_error(self._leader_address(shard)))
        return led


def _cluster_of(membership: Membership) -> operations_pb2.GetClusterResponse:
    loads, workers = membership.loads, membership.map.workers
    return operations_pb2.GetClusterResponse(
        shards=[
            operations_pb2.ClusterShard(
                leader=load.leader,
                workers=sorted(address for address, of in workers.items() if of == shard),
                num_workers=load.num_workers,
                num_live=load.num_live,
                num_waiting=load.num_waiting,
            )
            for shard, load in enumerate(loads)
        ],
        schedulers=sorted(membership.members.values()),
    )


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
