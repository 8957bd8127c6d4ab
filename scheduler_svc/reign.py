"""One leadership, from the requests that it finds to those that it leaves."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.restoring import homes_of, restored, runs_of, stored_of
from scheduler_svc.core.sequence import Group, Nobody
from scheduler_svc.core.view import Limits
from scheduler_svc.engine import Engine
from scheduler_svc.gateways.desk import Desk
from scheduler_svc.lanes.discovery import Discovery
from scheduler_svc.lanes.options import LaneHooks, LaneOptions
from scheduler_svc.lanes.patience import Patience
from scheduler_svc.operations.step_times import StepTimes
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.store import Store
from scheduler_svc.tenure import Tenure

log = structlog.get_logger()

HELLO_DELAY_S = 0.1
# A worker that lives says so in less; one that has died is not waited for any longer.
HOMES_WITHIN_S = 0.5


@dataclass(frozen=True)
class Estate:
    """What one leadership leaves to the next."""

    groups: list[Group] = field(default_factory=list)
    # The last step that is known of each pool, by incarnation.
    steps: Mapping[int, int] = field(default_factory=dict)


async def found(store: Store) -> Estate:
    """What another leader has left in Redis: records, and what the pools have journaled since."""
    pools = await store.pools()
    journals = {pool: await store.pool(pool, num_blocks=0).journal() for pool in pools}
    runs = runs_of(entry for journal in journals.values() for entry in journal)
    groups = [restored(stored, runs) for stored in await store.load_live()]
    homes = homes_of(journals)
    for sequence in (other for group in groups for other in group.sequences):
        sequence.home = homes.get(sequence.sequence_id)
    if groups:
        log.info("requests taken over", requests=len(groups))
    return Estate(groups, dict.fromkeys(pools, 0))


async def rewritten(store: Store, estate: Estate) -> Estate:
    """What this scheduler knows, written over what Redis has after it lost writes."""
    await store.replace_live([stored_of(group) for group in estate.groups])
    for group in estate.groups:
        for sequence in group.sequences:
            sequence.num_folded = sequence.num_journaled
    pools = await store.pools()
    return Estate(estate.groups, {pool: estate.steps.get(pool, 0) for pool in pools})


class Reign:
    """The parts of a leading scheduler, wired. `run` works until it is halted, or until Redis says
    that the lead is lost."""

    def __init__(
        self,
        settings: SchedulerSettings,
        store: Store,
        tenure: Tenure,
        estate: Estate,
        steps: StepTimes,
    ) -> None:
        self.tenure = tenure
        self.epoch = store.leadership.epoch
        self._recorder = Recorder(store, settings.finished_ttl_s, settings.finished_max_bytes)
        self.engine = Engine(
            self._recorder,
            store.match_pools,
            settings.placement,
            by_priority=settings.scheduling_policy == "priority",
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
        )
        self._inherited = [s for group in estate.groups for s in group.sequences]
        for group in estate.groups:
            self.engine.restore(group)
        self.desk = Desk(self.engine, store, self._recorder, tenure, settings.orphan_grace_s)
        hooks = LaneHooks(
            left=self.engine.left,
            others_open=self.engine.others_open,
            quiet_s=self.engine.arrivals.quiet_s,
            somebody_waits=self.engine.somebody_waits,
            may_send=self.tenure.held,
            given_back=self.engine.give_back,
            room=self.engine.room,
            stepped=steps.observe,
            fold=self._recorder.fold,
        )
        self._discovery = Discovery(
            settings.worker_addresses,
            store,
            self.engine,
            self._recorder,
            _lane_options(settings),
            hooks,
            estate.steps,
        )

    async def run(self) -> None:
        """Errors of the store come as a group of exceptions."""
        # Before any pool changes: its journal may be all that knows of some tokens.
        await Patience().ask(lambda: self._recorder.fold(self._inherited))
        homes = {sequence.home for sequence in self._inherited if sequence.home is not None}
        self._inherited = []
        self.engine.await_lanes(homes, HOMES_WITHIN_S)
        async with asyncio.TaskGroup() as group:
            endless = [
                group.create_task(work)
                for work in (
                    self.engine.run(),
                    self._recorder.run(),
                    self._announce(),
                )
            ]
            await group.create_task(self._discovery.run())
            for task in endless:
                task.cancel()

    def halt(self) -> None:
        """Sends no plan more; `run` returns when what is in flight is delivered."""
        self._discovery.halt()

    async def flush(self) -> None:
        """Brings the records up to all that is known."""
        groups = list(self.engine.live.values())
        await self._recorder.fold([s for group in groups for s in group.sequences])

    def estate(self) -> Estate:
        """The requests as they are known here, to be gone on with under another leadership. This
        one is over then."""
        # What has ended unwritten ends anew there, by its tokens or its error.
        groups = [*self._recorder.unwritten, *self.engine.live.values()]
        for group in groups:
            group.subscriber = Nobody()
            group.hold = None
            group.siblings = []
            for sequence in group.sequences:
                sequence.rewind()
                sequence.has_left = False
        return Estate(groups, self._discovery.steps)

    async def _announce(self) -> None:
        """Readiness that comes and goes in a moment is nobody's news."""
        changed = self.engine.lanes_changed
        while True:
            await changed.wait()
            await asyncio.sleep(HELLO_DELAY_S)
            changed.clear()
            self.desk.announce()


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
        multi_step_s=settings.multi_step_s,
        enable_prefix_caching=settings.enable_prefix_caching,
        check_every_step=settings.check_every_step,
        step_timeout_s=settings.step_timeout_s,
    )
