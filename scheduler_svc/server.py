"""The scheduler process: its server, its health, and the shards that it stands by for or leads."""

import asyncio

from prometheus_client import CollectorRegistry

from quire.internal.v1 import (
    leadership_pb2,
    leadership_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.health import Health
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server
from quire.service.lifecycle import Signals, start_server
from quire.service.metrics.server import (
    MetricsServer,
    export_expiry,
    export_process,
    serving_metrics,
)
from quire.service.tls import ServerCertificates
from quire.service.tracing.spans import SpanExporter
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.cluster.worker_addresses import WorkerAddresses
from scheduler_svc.engine.engine import Engine
from scheduler_svc.gateway.frame_handler import FrameHandler
from scheduler_svc.gateway.servicer import SchedulerServicer
from scheduler_svc.leadership.servicer import LeadershipServicer
from scheduler_svc.operations.collector import EngineCollector
from scheduler_svc.operations.servicer import LedShard, OperationsServicer
from scheduler_svc.operations.step_histograms import StepHistograms
from scheduler_svc.process import Process
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.shard import Shard
from scheduler_svc.store.cluster import ClusterStore
from scheduler_svc.store.id_directory import IdDirectory
from scheduler_svc.store.retry import RedisRetry
from scheduler_svc.ticks import sleep_ticks

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


class Scheduler:
    """The service. `serve` returns after a drain, or raises an unexpected error."""

    def __init__(self, settings: SchedulerSettings, signals: Signals) -> None:
        """OSError if traces cannot be exported as the settings want it."""
        self._settings = settings
        self._spans: SpanExporter | None = settings.span_exporter("scheduler")
        self._signals = signals
        # None if metrics are off, and before the start.
        self.metrics_server: MetricsServer | None = None
        # By number; all that the cluster has.
        self.shards: dict[int, Shard] = {}
        self._process: Process | None = None
        self._health = Health([_REDIS, _LEAD, _WORKER], _SERVICES)
        self._steps = StepHistograms()
        self._collector = EngineCollector(self._steps, self._engines, self._holds_lease)
        self._server = Server(Limits(INTERNAL_MESSAGE_BYTES))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
            SchedulerServicer(self._handler_of, self._leader_address, self._num_shards),
            self._server,
        )
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(
            OperationsServicer(self._led_shard, self._leader_address, self._membership),
            self._server,
        )
        leadership_pb2_grpc.add_LeadershipServiceServicer_to_server(
            LeadershipServicer(lambda: [shard.lease for shard in self.shards.values()]),
            self._server,
        )

    async def serve(self) -> None:
        registry = CollectorRegistry()
        registry.register(self._collector)
        certificates = self._settings.server_certificates("h2")
        export_process(registry)
        export_expiry(registry, certificates)
        async with serving_metrics(self._settings.metrics_listen, registry) as self.metrics_server:
            await self._serve(certificates)

    async def _serve(self, certificates: ServerCertificates | None) -> None:
        settings = self._settings
        bound = await start_server(
            self._server,
            settings.listen,
            _SERVICES,
            self._health,
            settings.address_file,
            certificates,
            settings.health_listen,
        )
        address = settings.advertise or bound
        cluster = ClusterStore.at(settings.redis_url, settings.redis_password)
        membership = Membership(cluster, address, settings.lease_s)
        addresses = WorkerAddresses(settings.worker_addresses, membership, settings.api_server)
        directory = IdDirectory.at(settings.redis_url, settings.redis_password)
        self._process = Process(
            settings,
            address,
            membership,
            addresses,
            cluster,
            directory,
            RedisRetry(),
            {},
            self._steps,
            self._spans,
        )
        reporting = asyncio.create_task(self._report_health())
        try:
            await self._run(self._process)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await self._health.stopping()
            await self._server.stop(grace=STOP_GRACE_S)
            await self._health.close()
            await cluster.close()
            await directory.close()
            if self._spans is not None:
                await self._spans.close()

    async def _run(self, process: Process) -> None:
        """Run all shards of the map until the first signal. An unexpected error of any part ends
        it."""
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(process.addresses.run()),
                group.create_task(process.membership.run()),
            ]
            if shards := await self._start_shards(process, group):
                await asyncio.wait(shards)
            for task in background:
                task.cancel()

    async def _start_shards(
        self, process: Process, group: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        """Start the shards of the map, and those added to it, until the first signal."""
        has_changed = asyncio.Event()
        running: list[asyncio.Task[None]] = []

        def check_number() -> None:
            if process.membership.map.num_shards > len(running):
                has_changed.set()

        process.membership.listen(check_number)
        while not self._signals.drain.is_set():
            for number in range(len(running), process.membership.map.num_shards):
                self.shards[number] = Shard(number, process, self._signals)
                running.append(group.create_task(self.shards[number].run()))
            has_changed.clear()
            await self._wait_either(has_changed, self._signals.drain)
        process.membership.leave()
        return running

    async def _wait_either(self, *events: asyncio.Event) -> None:
        waiting = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    # What the servers ask for

    async def _handler_of(self, shard: int) -> FrameHandler | None:
        found = self.shards.get(shard)
        return None if found is None else await found.handler_soon()

    def _leader_address(self, shard: int) -> str:
        found = self.shards.get(shard)
        return "" if found is None else found.standby.leader_address

    def _num_shards(self) -> int:
        process = self._process
        if process is None or not process.membership.is_known.is_set():
            return 0
        return process.membership.map.num_shards

    def _led_shard(self, shard: int) -> LedShard | None:
        found = self.shards.get(shard)
        if found is None or found.term is None:
            return None
        term = found.term
        add_shards = term.participation.add_shards if shard == 0 else None
        return LedShard(term.engine, term.epoch, add_shards)

    def _membership(self) -> Membership | None:
        return None if self._process is None else self._process.membership

    def _holds_lease(self, shard: int) -> bool:
        term = self.shards[shard].term
        return term is not None and term.lease.is_held

    def _engines(self) -> dict[int, Engine | None]:
        """By shard, None for those that others lead."""
        return {
            number: None if shard.term is None else shard.term.engine
            for number, shard in sorted(self.shards.items())
        } or {0: None}

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
            await sleep_ticks(FAILING_INTERVAL_S if any(checks.values()) else PASSING_INTERVAL_S)

    def _checks(self) -> dict[str, str | None]:
        """The reason why each check fails; None if it passes. A scheduler works if it leads any
        shard, and a shard that it leads has a worker."""
        terms = [shard.term for shard in self.shards.values() if shard.term is not None]
        if not terms:
            membership = None if self._process is None else self._process.membership
            problem = None if membership is None else membership.problem
            return {
                _REDIS: self._redis_error([x.standby.redis_error for x in self.shards.values()]),
                _LEAD: problem or "another scheduler leads",
                _WORKER: "this scheduler does not lead",
            }
        has_worker = any(term.engine.lanes for term in terms)
        return {
            _REDIS: self._redis_error([term.lease.error for term in terms]),
            _LEAD: None,
            _WORKER: None if has_worker else "no worker has joined",
        }

    def _redis_error(self, of_leases: list[str | None]) -> str | None:
        """Why Redis cannot be used; None if it can. It may refuse a part of the calls, such as
        scripts with commands that its user may not run."""
        process = self._process
        if process is None or not self.shards:
            return "not connected yet"
        errors = (*of_leases, process.membership.why_silent, process.retry.error)
        return next((error for error in errors if error is not None), None)
