"""The scheduler's life: start up, stand by, lead, hand over, stop."""

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
from quire.service.health import Health
from quire.service.lifecycle import Signals, start_server
from quire.service.metrics import MetricsServer, serving_metrics
from scheduler_svc.gateways.servicer import SchedulerServicer
from scheduler_svc.lanes.patience import Patience
from scheduler_svc.operations.collector import EngineCollector
from scheduler_svc.operations.servicer import OperationsServicer
from scheduler_svc.operations.step_times import StepTimes
from scheduler_svc.reign import Estate, Reign, found, rewritten
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.standby import Standby
from scheduler_svc.store.errors import LeadLost, RequestFault, StaleEpoch, StoreError
from scheduler_svc.store.store import Store
from scheduler_svc.tenure import Tenure, WritesLost

log = structlog.get_logger()

_SERVICES = (
    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["OperationsService"].full_name,
)
_REDIS, _LEAD, _WORKER = "redis", "lead", "worker"
# While something is missing, and while all is well.
HEALTH_INTERVAL_S = 0.1
WELL_INTERVAL_S = 0.5
STOP_GRACE_S = 1.0

_Result = TypeVar("_Result")


class Scheduler:
    """The service. `serve` returns after a drain; an unexpected error ends it."""

    def __init__(self, settings: SchedulerSettings, signals: Signals) -> None:
        self._settings = settings
        self._signals = signals
        # None where nobody asked for metrics, and before the start.
        self.metrics_server: MetricsServer | None = None
        self._health = Health([_REDIS, _LEAD, _WORKER], _SERVICES)
        self._standby: Standby | None = None
        self._reign: Reign | None = None
        self._servicer = SchedulerServicer(self._leader_address)
        self._operations = OperationsServicer(self._leader_address)
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
        address = await start_server(
            self._server, settings.listen, _SERVICES, self._health, settings.address_file
        )
        store = Store.at(settings.redis_url)
        telling = asyncio.create_task(self._tell_health())
        try:
            await self._rule(store, settings.advertise or address)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            await self._health.stopping()
            await self._server.stop(grace=STOP_GRACE_S)
            await store.close()

    async def _rule(self, store: Store, address: str) -> None:
        """Stands by and leads, again and again, until the first signal."""
        self._standby = standby = Standby(store, address, self._settings.lease_s)
        estate: Estate | None = None
        while not self._signals.drain.is_set():
            if estate is None:
                leadership = await self._unless_drained(standby.won())
            else:
                leadership = await self._unless_drained(standby.won_again())
            if leadership is None:
                estate = None
                continue
            log.info("leading", epoch=leadership.epoch)
            estate = await self._lead(store, estate)

    async def _lead(self, store: Store, known: Estate | None) -> Estate | None:
        """Leads with what it knows, else with what Redis has. What is to be gone on with when Redis
        has lost writes; None when somebody else leads, or after a drain."""
        tenure = Tenure(store, self._settings.lease_s)
        reign: Reign | None = None
        is_stale = has_lost_writes = False
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(tenure.run())
                estate = await Patience().ask(
                    lambda: found(store) if known is None else rewritten(store, known)
                )
                reign = Reign(self._settings, store, tenure, estate, self._steps)
                await self._reign_until_drained(reign)
                renewing.cancel()
        except* StaleEpoch as errors:
            log.warning("another scheduler leads", why=_reason(errors))
            is_stale = True
        except* (LeadLost, WritesLost, RequestFault) as errors:
            log.warning("Redis has lost writes", why=_reason(errors))
            has_lost_writes = True
        finally:
            # What has been said goes out while the lead is still held.
            self._abdicate(reign)
        if reign is not None and not (is_stale or has_lost_writes):
            await self._release(store, reign)
        tenure.end()
        if is_stale or not has_lost_writes:
            return None
        return known if reign is None else reign.estate()

    async def _reign_until_drained(self, reign: Reign) -> None:
        self._reign = reign
        self._collector.engine = reign.engine
        self._operations.leads(reign.engine, reign.epoch)
        self._servicer.desk = reign.desk
        work = asyncio.create_task(reign.run())
        try:
            await self._unless_drained(asyncio.shield(work))
            if not work.done():
                await self._signals.drain_within(
                    lambda: self._hand_over(reign, work), self._settings.drain_grace_s
                )
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _hand_over(self, reign: Reign, work: asyncio.Task[None]) -> None:
        """Lets what is in flight come back and be delivered."""
        log.info("draining", requests=len(reign.engine.live))
        reign.halt()
        await asyncio.wait({work})

    async def _release(self, store: Store, reign: Reign) -> None:
        """Leaves everything in Redis, and the lead to whoever wants it."""
        try:
            await reign.flush()
            await store.release_lead()
        except StoreError as error:
            log.warning("the lead is not released", why=str(error))

    def _abdicate(self, reign: Reign | None) -> None:
        self._reign = None
        self._servicer.desk = None
        self._operations.follows()
        self._collector.engine = None
        if reign is not None:
            reign.desk.close()

    def _leader_address(self) -> str:
        return self._standby.leader_address if self._standby else ""

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

    # Health

    async def _tell_health(self) -> None:
        told: dict[str, str | None] = {}
        while True:
            checks = self._checks()
            changed = [check for check in checks.items() if check not in told.items()]
            told = checks
            for check, why_not in changed:
                if why_not is None:
                    await self._health.passed(check)
                else:
                    await self._health.failed(check, why_not)
            await asyncio.sleep(HEALTH_INTERVAL_S if any(checks.values()) else WELL_INTERVAL_S)

    def _checks(self) -> dict[str, str | None]:
        """Why each fails; None where it holds."""
        reign, standby = self._reign, self._standby
        if reign is None:
            trouble = standby.trouble if standby else "not asked yet"
            return {_REDIS: trouble, _LEAD: "another scheduler leads", _WORKER: "not led from here"}
        no_worker = None if reign.engine.lanes else "no worker has joined"
        return {_REDIS: reign.tenure.trouble, _LEAD: None, _WORKER: no_worker}


def _reason(errors: BaseExceptionGroup[BaseException]) -> str:
    """The first leaf's."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
