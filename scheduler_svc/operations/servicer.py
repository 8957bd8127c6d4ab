"""`OperationsService`: what operators see, and what they may tell the scheduler."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.service.errors import abort, unavailable
from scheduler_svc.gateways.servicer import standby
from scheduler_svc.operations.block_maps import BlockMaps
from scheduler_svc.operations.status import status_of
from scheduler_svc.operations.views import EngineView
from scheduler_svc.store.errors import StoreError

log = structlog.get_logger()

_Context = grpc.aio.ServicerContext[Any, Any]


class OperationsServicer(operations_pb2_grpc.OperationsServiceServicer):
    """Without an engine, while this scheduler does not lead, it turns all away."""

    def __init__(self, leader_address: Callable[[], str]) -> None:
        """`leader_address`: as far as it is known; empty if it is not."""
        self._leader_address = leader_address
        self._engine: EngineView | None = None
        self._epoch = 0
        self._maps = BlockMaps()
        self._started_s = time.monotonic()

    def leads(self, engine: EngineView, epoch: int) -> None:
        """From here on there is something to tell."""
        self._engine, self._epoch = engine, epoch

    def follows(self) -> None:
        """From here on somebody else has something to tell."""
        self._engine = None

    async def GetStatus(  # noqa: N802
        self, request: operations_pb2.GetStatusRequest, context: _Context
    ) -> operations_pb2.GetStatusResponse:
        engine = await self._served(context)
        maps = await self._maps.of(dict(engine.lanes)) if request.with_block_maps else {}
        return status_of(engine, self._epoch, time.monotonic() - self._started_s, maps)

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

    async def _served(self, context: _Context) -> EngineView:
        if self._engine is None:
            await abort(context, standby(self._leader_address()))
        return self._engine
