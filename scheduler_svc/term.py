"""One leadership term of a shard: recovers live requests, runs the engine, hands requests over."""

import asyncio

from scheduler_svc.core.beams import rewind
from scheduler_svc.core.sequence import NullSubscriber
from scheduler_svc.core.tenants import export_tenants, restore_tenants
from scheduler_svc.engine.claims import Claims
from scheduler_svc.engine.discovery import Discovery
from scheduler_svc.engine.dispatcher import MatchPools
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.moves import Moves
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.engine.tenant_exchange import TenantExchange
from scheduler_svc.engine.tenant_writer import TenantWriter
from scheduler_svc.gateway.frame_handler import FrameHandler
from scheduler_svc.lane.options import LaneHooks, LaneOptions
from scheduler_svc.leadership.lease import Lease
from scheduler_svc.operations.step_histograms import StepHistograms
from scheduler_svc.participation import Participation
from scheduler_svc.process import Process
from scheduler_svc.recovery import RecoveredState
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.store import Store

# Delay by which changes of readiness are announced together.
HELLO_DELAY_S = 0.1
# Maximum wait for the lanes of recovered workers; a live worker needs less.
LANES_WITHIN_S = 0.5


class Term:
    """The components of a shard's leader. `run` ends when halted or when leadership is lost."""

    def __init__(
        self,
        process: Process,
        shard: int,
        store: Store,
        lease: Lease,
        recovered: RecoveredState,
    ) -> None:
        settings = process.settings
        self.lease = lease
        self.epoch = store.leadership.epoch
        self._retry = store.retry
        self._record_writer = RecordWriter(
            store, settings.finished_ttl_s, settings.finished_max_bytes
        )
        self.engine = _engine(process, store, self._record_writer)
        self._recovered = [s for group in recovered.groups for s in group.sequences]
        self._restore(recovered)
        self._tenant_writer = TenantWriter(self.engine, store)
        claims = Claims(
            process.directory,
            store,
            shard,
            process.membership,
            self.engine.live,
            settings.finished_ttl_s,
        )
        moves = self._make_moves(process, shard, store, claims)
        tenants = TenantExchange(
            shard, self.epoch, self.engine, process.membership, process.cluster
        )
        self.handler = FrameHandler(
            self.engine,
            store,
            self._record_writer,
            lease,
            settings.orphan_grace_s,
            claims,
            moves,
            tenants,
        )
        self._discovery = Discovery(
            process.addresses,
            shard,
            store,
            self.engine,
            self._record_writer,
            _lane_options(settings),
            self._lane_hooks(process.steps),
            recovered.steps,
            settings.worker_tls,
        )
        self.participation = Participation(
            process, shard, store, self.engine, self.handler, claims, moves, tenants, lease
        )

    def _make_moves(self, process: Process, shard: int, store: Store, claims: Claims) -> Moves:
        return Moves(
            shard,
            process.membership,
            self.engine,
            store,
            process.stores,
            self._record_writer,
            claims,
            lambda: self.lease.is_held,
            # The handler has the moves, so it is created after them.
            on_given=lambda group, target: self.handler.give(group, target),
            on_taken=lambda group: self.handler.take(group),
        )

    def _restore(self, recovered: RecoveredState) -> None:
        self.engine.output_model = recovered.model
        for group in recovered.groups:
            self.engine.restore(group)
        # After the requests, which are not new ones: they lift no counter.
        restore_tenants(recovered.tenants, self.engine.shares, self.engine.quotas)

    def _lane_hooks(self, steps: StepHistograms) -> LaneHooks:
        return LaneHooks(
            sequence_finished=self.engine.sequence_finished,
            has_other_lane=self.engine.has_other_lane,
            since_last_arrival_s=self.engine.arrivals.since_last_arrival_s,
            has_waiting=self.engine.has_waiting,
            may_send=lambda: self.lease.is_held,
            wait_for_lease=self.lease.wait_held,
            lane_taken=self.lease.doubt,
            requeue=self.engine.requeue,
            capacity_freed=self.engine.dispatcher.wake,
            step_completed=steps.observe,
            compact=self._record_writer.compact,
        )

    async def run(self) -> None:
        """Run the term. Errors of the store are raised in an exception group."""
        # Before any pool changes: its journal may hold the only copy of some tokens.
        await self._retry(lambda: self._record_writer.compact(self._recovered))
        last_incarnations = {
            s.last_incarnation for s in self._recovered if s.last_incarnation is not None
        }
        self._recovered = []
        self.engine.dispatcher.wait_for_lanes(last_incarnations, LANES_WITHIN_S)
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(work)
                for work in (
                    self.engine.dispatcher.run(),
                    self._record_writer.run(),
                    self._announce_changes(),
                    self._tenant_writer.run(),
                    self.participation.run(),
                )
            ]
            await group.create_task(self._discovery.run())
            for task in background:
                task.cancel()

    def halt(self) -> None:
        """Send no more plans; `run` returns when the steps in flight are delivered."""
        self._discovery.halt()

    async def flush(self) -> None:
        """Bring the records of all live requests, and what is stored of the tenants, up to date."""
        groups = list(self.engine.live.values())
        await self._record_writer.compact([s for group in groups for s in group.sequences])
        await self._tenant_writer.write()

    def export_state(self) -> RecoveredState:
        """Hand the live requests to this scheduler's next term; this one must not run any more."""
        # Requests whose endings are unwritten end again there, by their tokens or their error.
        groups = [*self._record_writer.unwritten, *self.engine.live.values()]
        for group in groups:
            group.subscriber = NullSubscriber()
            group.pinned_blocks = None
            group.siblings = []
            for sequence in group.sequences:
                rewind(sequence)
                sequence.is_finished = False
        queued = [group.sequences[0] for group in groups]
        charged_again = [first for first in queued if not first.has_precedence]
        tenants = export_tenants(self.engine.shares, self.engine.quotas, charged_again)
        return RecoveredState(groups, self._discovery.steps, tenants, self.engine.output_model)

    async def _announce_changes(self) -> None:
        """Announce readiness and the model to the gateways, at most once per `HELLO_DELAY_S`."""
        changed = self.engine.lanes_changed
        while True:
            await changed.wait()
            await asyncio.sleep(HELLO_DELAY_S)
            changed.clear()
            self.handler.announce()


def _engine(process: Process, store: Store, record_writer: RecordWriter) -> Engine:
    settings = process.settings
    return Engine(
        record_writer,
        _match_pools(store),
        settings.placement,
        store.leadership.epoch,
        by_priority=settings.scheduling_policy == "priority",
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        spans=process.spans,
    )


def _match_pools(store: Store) -> MatchPools:
    """That of the store, repeated while Redis is unavailable."""
    return lambda pools, queries: store.retry(lambda: store.match_pools(pools, queries))


def _lane_options(settings: SchedulerSettings) -> LaneOptions:
    return LaneOptions(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        watermark_share=settings.watermark,
        policy=settings.batch_policy,
        preemption_mode=settings.preemption_mode,
        max_num_partial_prefills=settings.max_num_partial_prefills,
        max_long_partial_prefills=settings.max_long_partial_prefills,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        num_lookahead_slots=settings.num_lookahead_slots,
        pipeline_depth=settings.pipeline_depth,
        multi_step_s=settings.multi_step_s,
        max_prefill_s=settings.max_prefill_s,
        enable_prefix_caching=settings.enable_prefix_caching,
        check_every_step=settings.check_every_step,
        step_timeout_s=settings.step_timeout_s,
    )
