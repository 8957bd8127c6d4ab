"""The scheduler's lifecycle: start, stand by, lead, hand over, stop."""

import asyncio
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import grpc
import structlog
from prometheus_client import CollectorRegistry

from quire.internal.v1 import (
    leadership_pb2,
    leadership_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from quire.service.channels import INTERNAL_MESSAGE_BYTES, server_options
from quire.service.health import Health
from quire.service.lifecycle import Signals, start_server
from quire.service.metrics import MetricsServer, serving_metrics
from quire.service.tracing.spans import SpanExporter
from scheduler_svc.gateway.servicer import SchedulerServicer
from scheduler_svc.leadership.lease import Lease, WritesLost
from scheduler_svc.leadership.servicer import LeadershipServicer
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.operations.collector import EngineCollector
from scheduler_svc.operations.servicer import OperationsServicer
from scheduler_svc.operations.step_histograms import StepHistograms
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.errors import LeadershipLost, RecordMismatch, StaleEpoch, StoreError
from scheduler_svc.store.retry import retry_unavailable
from scheduler_svc.store.store import Store
from scheduler_svc.term import RecoveredState, Term, recover, rewrite

log = structlog.get_logger()

_SERVICES = (
    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["OperationsService"].full_name,
    leadership_pb2.DESCRIPTOR.services_by_name["LeadershipService"].full_name,
)
_REDIS, _LEAD, _WORKER = "redis", "lead", "worker"
# Intervals of the health checks while one fails, and while all pass.
FAILING_INTERVAL_S = 0.1
PASSING_INTERVAL_S = 0.5
STOP_GRACE_S = 1.0

_Result = TypeVar("_Result")


class Scheduler:
    """The service. `serve` returns after a drain, or raises an unexpected error."""

    def __init__(self, settings: SchedulerSettings, signals: Signals) -> None:
        """OSError if traces cannot be exported as the settings want it."""
        self._settings = settings
        self._spans: SpanExporter | None = settings.span_exporter("scheduler")
        self._signals = signals
        # None if metrics are off, and before the start.
        self.metrics_server: MetricsServer | None = None
        self._health = Health([_REDIS, _LEAD, _WORKER], _SERVICES)
        self._standby: Standby | None = None
        self._term: Term | None = None
        self._servicer = SchedulerServicer(self._leader_address)
        self._operations = OperationsServicer(self._leader_address)
        self._leadership = LeadershipServicer()
        self._steps = StepHistograms()
        self._collector = EngineCollector(self._steps)
        self._server = grpc.aio.server(options=server_options(INTERNAL_MESSAGE_BYTES))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self._servicer, self._server)
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(self._operations, self._server)
        leadership_pb2_grpc.add_LeadershipServiceServicer_to_server(self._leadership, self._server)

    @property
    def leading(self) -> bool:
        """Whether gateways are served."""
        return self._servicer.handler is not None

    async def serve(self) -> None:
        registry = CollectorRegistry()
        registry.register(self._collector)
        async with serving_metrics(self._settings.metrics_listen, registry) as self.metrics_server:
            await self._serve()

    async def _serve(self) -> None:
        settings = self._settings
        address = await start_server(
            self._server,
            settings.listen,
            _SERVICES,
            self._health,
            settings.address_file,
            settings.server_certificates(),
            settings.health_listen,
        )
        store = Store.at(settings.redis_url, settings.redis_password)
        self._leadership.lease = store.lease
        reporting = asyncio.create_task(self._report_health())
        try:
            await self._run_terms(store, settings.advertise or address)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await self._health.stopping()
            await self._server.stop(grace=STOP_GRACE_S)
            await self._health.close()
            await store.close()
            if self._spans is not None:
                await self._spans.close()

    async def _run_terms(self, store: Store, address: str) -> None:
        """Alternate between standby and terms until the first signal."""
        settings = self._settings
        standby = Standby(store.lease, address, settings.lease_s, settings.peer_tls)
        self._standby = standby
        state: RecoveredState | None = None
        while not self._signals.drain.is_set():
            if state is None:
                leadership = await self._unless_drained(standby.acquire())
            else:
                leadership = await self._unless_drained(standby.reacquire())
            if leadership is None:
                state = None
                continue
            log.info("leading", epoch=leadership.epoch)
            state = await self._lead(store, state)

    async def _lead(self, store: Store, previous: RecoveredState | None) -> RecoveredState | None:
        """Lead for one term, with the previous state, or else with that of Redis. Returns the state
        to continue with if Redis lost writes; None if another scheduler leads or after a drain."""
        lease = Lease(store.lease, self._settings.lease_s)
        term: Term | None = None
        is_stale = has_lost_writes = False
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(lease.run())
                recovered = await retry_unavailable(
                    lambda: recover(store) if previous is None else rewrite(store, previous)
                )
                term = Term(self._settings, store, lease, recovered, self._steps, self._spans)
                await self._run_term(term)
                renewing.cancel()
        except* StaleEpoch as errors:
            log.warning("another scheduler leads", why=str(next(leaves(errors))))
            is_stale = True
        except* (LeadershipLost, WritesLost, RecordMismatch) as errors:
            log.warning("Redis may have lost writes", why=str(next(leaves(errors))))
            has_lost_writes = True
        finally:
            # Buffered frames are sent while the lease is still held.
            self._stop_term(term)
        if term is not None and not (is_stale or has_lost_writes):
            await self._release(store, term)
        lease.end()
        if is_stale or not has_lost_writes:
            return None
        return previous if term is None else term.export_state()

    async def _run_term(self, term: Term) -> None:
        self._term = term
        self._collector.engine = term.engine
        self._operations.start_leading(term.engine, term.epoch)
        self._servicer.handler = term.handler
        work = asyncio.create_task(term.run())
        try:
            await self._unless_drained(asyncio.shield(work))
            if not work.done():
                await self._signals.drain_within(
                    lambda: self._hand_over(term, work), self._settings.drain_grace_s
                )
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _hand_over(self, term: Term, work: asyncio.Task[None]) -> None:
        """Wait until the steps in flight are complete and delivered."""
        log.info("draining", requests=len(term.engine.live))
        term.halt()
        await asyncio.wait({work})

    async def _release(self, store: Store, term: Term) -> None:
        """Write all state to Redis and release the lease."""
        try:
            await term.flush()
            await store.lease.release()
        except StoreError as error:
            log.warning("the lease is not released", why=str(error))

    def _stop_term(self, term: Term | None) -> None:
        self._term = None
        self._servicer.handler = None
        self._operations.stop_leading()
        self._collector.engine = None
        if term is not None:
            term.handler.close()

    def _leader_address(self) -> str:
        return self._standby.leader_address if self._standby else ""

    async def _unless_drained(self, work: Awaitable[_Result]) -> _Result | None:
        """Wait for the work; None, with the work cancelled, if the first signal arrives before."""
        task = asyncio.ensure_future(work)
        drain = asyncio.create_task(self._signals.drain.wait())
        try:
            await asyncio.wait({task, drain}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            drain.cancel()

    # Health

    async def _report_health(self) -> None:
        reported: dict[str, str | None] = {}
        while True:
            checks = self._checks()
            changed = [check for check in checks.items() if check not in reported.items()]
            reported = checks
            for check, why_not in changed:
                if why_not is None:
                    await self._health.passed(check)
                else:
                    await self._health.failed(check, why_not)
            await asyncio.sleep(FAILING_INTERVAL_S if any(checks.values()) else PASSING_INTERVAL_S)

    def _checks(self) -> dict[str, str | None]:
        """The reason why each check fails; None if it passes."""
        term, standby = self._term, self._standby
        if term is None:
            redis = standby.redis_error if standby else "not connected yet"
            return {
                _REDIS: redis,
                _LEAD: "another scheduler leads",
                _WORKER: "this scheduler does not lead",
            }
        no_worker = None if term.engine.lanes else "no worker has joined"
        return {_REDIS: term.lease.error, _LEAD: None, _WORKER: no_worker}


def leaves(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Iterate over the errors of a group and of the groups within it."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
