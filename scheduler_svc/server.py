"""The scheduler's life: start up, serve, drain, stop."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc
import structlog
from prometheus_client import CollectorRegistry

from quire.internal.v1 import (
    operations_pb2,
    operations_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from quire.service.channels import INTERNAL_MESSAGE_BYTES, server_options
from quire.service.errors import unavailable
from quire.service.health import Health
from quire.service.lifecycle import Signals, start_server
from quire.service.metrics import MetricsServer, serving_metrics
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.view import Limits
from scheduler_svc.engine import Engine
from scheduler_svc.gateways.desk import Desk
from scheduler_svc.gateways.servicer import SchedulerServicer
from scheduler_svc.lanes.discovery import Discovery
from scheduler_svc.lanes.options import LaneHooks, LaneOptions
from scheduler_svc.operations.collector import EngineCollector
from scheduler_svc.operations.servicer import OperationsServicer
from scheduler_svc.operations.step_times import StepTimes
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.errors import StoreError, StoreUnavailable
from scheduler_svc.store.requests import Ending, RequestState
from scheduler_svc.store.store import Store

log = structlog.get_logger()

_SERVICES = (
    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["OperationsService"].full_name,
)
_REDIS, _WORKER = "redis", "worker"
REDIS_RETRY_S = 1.0
CHECK_INTERVAL_S = 0.1
STOP_GRACE_S = 1.0

_Result = TypeVar("_Result")


class Scheduler:
    """The service. `serve` returns after a drain; an unexpected error ends it."""

    def __init__(self, settings: SchedulerSettings, signals: Signals) -> None:
        self._settings = settings
        self._signals = signals
        # None where nobody asked for metrics, and before the start.
        self.metrics_server: MetricsServer | None = None
        self._health = Health([_REDIS, _WORKER], _SERVICES)
        self._servicer = SchedulerServicer()
        self._operations = OperationsServicer()
        self._steps = StepTimes()
        self._collector = EngineCollector(self._steps)
        self._server = grpc.aio.server(options=server_options(INTERNAL_MESSAGE_BYTES))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self._servicer, self._server)
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(self._operations, self._server)

    @property
    def leading(self) -> bool:
        """Gateways are let in."""
        return self._servicer.desk is not None

    async def serve(self) -> None:
        registry = CollectorRegistry()
        registry.register(self._collector)
        async with serving_metrics(self._settings.metrics_listen, registry) as self.metrics_server:
            await self._serve()

    async def _serve(self) -> None:
        settings = self._settings
        await start_server(
            self._server, settings.listen, _SERVICES, self._health, settings.address_file
        )
        try:
            store = await self._unless_drained(self._connect())
            if store is not None:
                await self._lead(store)
        finally:
            await self._health.stopping()
            await self._server.stop(grace=STOP_GRACE_S)

    async def _connect(self) -> Store:
        """Connects to Redis as soon as it is there and lets us in."""
        said = ""
        while True:
            try:
                store = await Store.connect(self._settings.redis_url)
                await store.take_lead(self._settings.listen, lease_ms=0)
                await self._tidy(store)
            except StoreUnavailable as error:
                # Said once, not at every try.
                if str(error) != said:
                    said = str(error)
                    log.error("no Redis", why=said)
                await self._health.failed(_REDIS, said)
                await asyncio.sleep(REDIS_RETRY_S)
            else:
                log.info("leading", epoch=store.leadership.epoch)
                return store

    async def _tidy(self, store: Store) -> None:
        """Ends what a former leader has left: its pools, and requests that nobody serves now."""
        await store.sweep(keep=())
        lost = [Ending(r.record.key, RequestState.FAILED) for r in await store.load_live()]
        await store.finish(lost, self._settings.finished_ttl_s)
        if lost:
            log.warning("requests of a former leader are lost", requests=len(lost))

    async def _lead(self, store: Store) -> None:
        """Serves with Redis until the first signal, then lets requests end."""
        settings = self._settings
        recorder = Recorder(store, settings.finished_ttl_s)
        engine = Engine(
            recorder,
            store.match_pools,
            settings.placement,
            by_priority=settings.scheduling_policy == "priority",
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
        )
        self._collector.engine = engine
        self._operations.leads(engine, store.leadership.epoch)
        self._servicer.desk = desk = Desk(engine, store, recorder)
        work = asyncio.create_task(self._work(store, engine, recorder, desk))
        try:
            await self._unless_drained(asyncio.shield(work))
            if not work.done():
                desk.drain()
                await self._signals.drain_within(engine.until_idle, settings.drain_grace_s)
                engine.end_all(unavailable("STOPPING", "the scheduler is stopping"))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            desk.close()
            try:
                await recorder.flush()
            except StoreError as error:
                log.warning("the last records are not written", reason=str(error))
            await store.close()

    async def _unless_drained(self, work: Awaitable[_Result]) -> _Result | None:
        """The work's result; None, and the work is cancelled, if the first signal comes before."""
        task = asyncio.ensure_future(work)
        drain = asyncio.create_task(self._signals.drain.wait())
        try:
            await asyncio.wait({task, drain}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            drain.cancel()

    async def _work(self, store: Store, engine: Engine, recorder: Recorder, desk: Desk) -> None:
        hooks = LaneHooks(
            left=engine.left,
            given_back=engine.give_back,
            room=engine.room,
            stepped=self._steps.observe,
            fold=recorder.fold,
        )
        names = self._settings.worker_addresses
        discovery = Discovery(names, store, engine, _lane_options(self._settings), hooks)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            group.create_task(recorder.run())
            group.create_task(discovery.run())
            group.create_task(self._watch_redis(store))
            group.create_task(self._watch_workers(engine, desk))

    async def _watch_redis(self, store: Store) -> None:
        while True:
            try:
                await store.renew()
                await self._health.passed(_REDIS)
            except StoreUnavailable as error:
                await self._health.failed(_REDIS, str(error))
            await asyncio.sleep(REDIS_RETRY_S)

    async def _watch_workers(self, engine: Engine, desk: Desk) -> None:
        while True:
            if engine.lanes:
                await self._health.passed(_WORKER)
            else:
                await self._health.failed(_WORKER, "no worker has joined")
            desk.announce()
            await asyncio.sleep(CHECK_INTERVAL_S)


def _lane_options(settings: SchedulerSettings) -> LaneOptions:
    return LaneOptions(
        limits=Limits(
            block_size=0,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            watermark=0,
            policy=settings.batch_policy,
            preemption_mode=settings.preemption_mode,
            max_num_partial_prefills=settings.max_num_partial_prefills,
            max_long_partial_prefills=settings.max_long_partial_prefills,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            num_lookahead_slots=settings.num_lookahead_slots,
        ),
        watermark=settings.watermark,
        depth=settings.pipeline_depth,
        enable_prefix_caching=settings.enable_prefix_caching,
        check_every_step=settings.check_every_step,
    )
