"""One worker's lane: its sequences, and the loop that steps them."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from grpc import StatusCode

from quire.internal.v1 import worker_pb2
from quire.service.errors import failed
from scheduler_svc.core.placement import LaneLoad
from scheduler_svc.core.policy import Limits
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes.patience import Patience
from scheduler_svc.lanes.plan import build_plan
from scheduler_svc.lanes.result import check_result
from scheduler_svc.lanes.rows import Rows
from scheduler_svc.lanes.step import Planner, Step
from scheduler_svc.lanes.stream import Worker, WorkerStream
from scheduler_svc.store.errors import PoolFault
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import CommitReply, PrefixMatch

log = structlog.get_logger()

# Journal entries are folded into the request records once in so many steps.
FOLD_EVERY_STEPS = 64
IDLE_CHECK_S = 5.0


class Lane:
    """The sequences of one worker.

    `assigned` wait for a row here; `rows` have one. A sequence leaves its row in one way: it is
    marked (ended, failed), the next commit frees its blocks, the next plan releases the row.
    """

    def __init__(
        self,
        worker: Worker,
        stream: WorkerStream,
        pool: Pool,
        epoch: int,
        first_step: int,
        num_free_blocks: int,
        limits: Limits,
        on_left: Callable[[Sequence], None],
        on_room: Callable[[], None],
        on_given_back: Callable[[list[Sequence]], None],
        fold: Callable[[list[Sequence]], Awaitable[None]],
        enable_prefix_caching: bool,
        check_every_step: bool,
    ) -> None:
        self.worker = worker
        self.limits = limits
        self.assigned: list[Sequence] = []
        self.rows = Rows(limits.max_num_seqs, limits.block_size)
        self.draining = worker.draining
        self.num_free_blocks = num_free_blocks
        self._planner = Planner(limits, enable_prefix_caching)
        self._stream = stream
        self._pool = pool
        self._epoch = epoch
        self._step = first_step
        self._on_left = on_left
        self._on_room = on_room
        self._on_given_back = on_given_back
        self._fold = fold
        self._check_every_step = check_every_step
        self._checked_step = first_step
        self._wake = asyncio.Event()
        self._patience = Patience()

    # What the rest of the scheduler asks of a lane

    def assign(self, sequence: Sequence) -> None:
        self.assigned.append(sequence)
        self.wake()

    def wake(self) -> None:
        """There is something to do, or somebody left."""
        self._wake.set()

    def drain(self) -> None:
        """No new requests from here on; `run` returns when the last one has left."""
        if not self.draining:
            self.draining = True
            self.wake()

    async def match(self, sequences: list[Sequence]) -> list[PrefixMatch]:
        """The longest cached prefix of each sequence, now."""
        queries = [self._planner.matchable(sequence) for sequence in sequences]
        return await self._patience.ask(lambda: self._pool.match(queries))

    def load(self, sequence: Sequence, match: PrefixMatch) -> LaneLoad:
        """What this lane offers to a waiting sequence."""
        block_size = self.limits.block_size
        here = [*self.rows, *self.assigned]
        to_the_end = self._planner.to_the_end
        promised = sum(to_the_end(other) - len(other.block_ids) for other in here)
        spare = self.num_free_blocks - promised - self.limits.watermark
        return LaneLoad(
            num_uncached_tokens=len(sequence.token_ids) - match.num_hits * block_size,
            num_queued_tokens=sum(
                len(other.token_ids) - other.num_computed_tokens for other in here
            ),
            num_running=len(here),
            has_room=not self.draining
            and len(here) < self.limits.max_num_seqs
            and to_the_end(sequence) - match.num_hits + match.num_free_hits <= spare,
        )

    # The loop

    async def run(self) -> None:
        """Steps until the lane is drained. LaneLost or a StoreError ends it before that."""
        while True:
            self._wake.clear()
            if self._stream.lost:
                raise self._stream.lost
            if not await self._turn() and not self._wake.is_set():
                if self.draining and not self.rows:
                    return
                await self._rest()

    async def _rest(self) -> None:
        """Waits for something to do; a lane that rests for long enough checks itself once."""
        try:
            await asyncio.wait_for(self._wake.wait(), IDLE_CHECK_S)
        except TimeoutError:
            if self._checked_step != self._step:
                await self.check_integrity()

    async def check_integrity(self) -> None:
        """PoolFault unless the pool's references are exactly the block tables of the rows."""
        audit = await self._patience.ask(self._pool.audit)
        tables = self.rows.references()
        if audit.references != tables or audit.num_free != self.num_free_blocks:
            raise PoolFault(
                f"after step {self._step} the pool holds {audit.num_held} blocks and has "
                f"{audit.num_free} free; the lane's tables hold {len(tables)}, "
                f"its count says {self.num_free_blocks} free"
            )
        self._checked_step = self._step

    async def _turn(self) -> bool:
        """Decides, commits, delivers, sends one plan and takes its result. False: nothing to do."""
        step = await self._decide()
        if step is None:
            return False
        # A repeated commit gets the stored reply: asking again is safe.
        reply = await self._patience.ask(lambda: self._pool.commit(step.commit))
        self._step = step.commit.step
        self.num_free_blocks = reply.num_free_blocks
        self._deliver(step)
        plan = self._apply(step, reply)
        if step.departing or reply.admitted:
            # Rows and blocks came free, or an admission took fewer than it might have.
            self._on_room()
        await self._stream.send(plan)
        await self._fold_journal()
        self._take(await self._stream.result(), plan)
        if self._check_every_step:
            await self.check_integrity()
        return True

    async def _decide(self) -> Step | None:
        self._dismiss_assigned()
        candidates = list(self.assigned)
        matches = await self.match(candidates) if candidates else []
        # What has changed since the match is seen from here on, and nothing changes until the
        # commit is on its way.
        return self._planner.plan(
            self._step + 1, self.rows, candidates, matches, self.num_free_blocks
        )

    def _deliver(self, step: Step) -> None:
        """Tells the gateways what Redis has now, and who has left."""
        for sequence in (*step.running, *step.departing):
            if token_ids := sequence.unjournaled:
                first_index = sequence.num_journaled
                sequence.num_journaled += len(token_ids)
                sequence.subscriber.deliver(sequence, first_index, token_ids)
        for sequence in step.departing:
            self._on_left(sequence)

    def _apply(self, step: Step, reply: CommitReply) -> worker_pb2.BatchPlan:
        """Turns the reply into the plan; the lane's tables follow."""
        released = [self.rows.release(sequence) for sequence in step.departing]
        block_ids = iter(reply.appended)
        appended, scheduled, admitted = [], [], []
        for part in step.decision.scheduled:
            sequence = step.running[part.index]
            assert sequence.row is not None
            scheduled.append((sequence.row, part.num_scheduled_tokens))
            if part.num_new_blocks:
                appended.append((sequence.row, next(block_ids)))
                sequence.block_ids.extend(appended[-1][1])
        for entry, table in zip(step.decision.admitted, reply.admitted, strict=True):
            # None: its hits are gone since the match; it is considered again in the next step.
            if table is not None:
                sequence = step.candidates[entry.index]
                self.assigned.remove(sequence)
                row = self.rows.admit(sequence, table, entry.num_hits)
                scheduled.append((row, entry.num_scheduled_tokens))
                admitted.append((sequence, entry.num_scheduled_tokens))
        plan = build_plan(
            self._epoch,
            self._step,
            released,
            [sequence for sequence, _ in admitted],
            appended,
            scheduled,
        )
        for sequence, num_tokens in admitted:
            sequence.num_computed_tokens += num_tokens
            sequence.num_published_blocks = sequence.num_computed_tokens // self.limits.block_size
        return plan

    def _take(self, result: worker_pb2.StepResult, plan: worker_pb2.BatchPlan) -> None:
        check_result(result, plan, self.rows)
        for failure in result.failures:
            sequence = self.rows[failure.row]
            log.error("row failed", request=sequence.request_id, why=failure.reason)
            sequence.fail(failed(StatusCode.INTERNAL, "ROW_FAILED", failure.reason))
            sequence.blocks_are_sound = False
        for row, token_id in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            if not self.rows[row].leaving:
                self.rows[row].take(token_id)

    def _dismiss_assigned(self) -> None:
        """Lets go of those that wait here in vain."""
        if self.draining or any(sequence.leaving for sequence in self.assigned):
            stay = [] if self.draining else [other for other in self.assigned if not other.leaving]
            go = [sequence for sequence in self.assigned if sequence not in stay]
            self.assigned = stay
            self._on_given_back(go)

    async def _fold_journal(self) -> None:
        if self._step % FOLD_EVERY_STEPS == 0:
            await self._patience.ask(lambda: self._fold(list(self.rows)))
            await self._patience.ask(lambda: self._pool.trim_journal(self._step))
