"""One worker's lane: its sequences, and the loop that steps them."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from grpc import StatusCode

from quire.internal.v1 import worker_pb2
from quire.service.errors import failed
from scheduler_svc.core.placement import LaneLoad
from scheduler_svc.core.policy import (
    Decision,
    Limits,
    Running,
    Waiting,
    blocks_to_the_end,
    schedule,
)
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes.plan import build_plan
from scheduler_svc.lanes.stream import LaneLost, Worker, WorkerStream
from scheduler_svc.store.errors import PoolFault, StoreUnavailable
from scheduler_svc.store.hashing import num_matchable_blocks
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import (
    Admission,
    Append,
    Commit,
    CommitReply,
    Departure,
    PrefixMatch,
    Publication,
    TokenRun,
)

log = structlog.get_logger()

# Journal entries are folded into the request records once in so many steps.
FOLD_EVERY_STEPS = 64
REDIS_RETRY_S = 0.2
IDLE_CHECK_S = 5.0

_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True)
class _Step:
    """What one turn of the loop does, decided before anything is done."""

    decision: Decision
    running: list[Sequence]
    candidates: list[Sequence]
    departing: list[Sequence]
    commit: Commit


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
        self.rows: dict[int, Sequence] = {}
        self.draining = worker.draining
        self.num_free_blocks = num_free_blocks
        self._free_rows = list(range(limits.max_num_seqs))
        self._stream = stream
        self._pool = pool
        self._epoch = epoch
        self._step = first_step
        self._on_left = on_left
        self._on_room = on_room
        self._on_given_back = on_given_back
        self._fold = fold
        self._enable_prefix_caching = enable_prefix_caching
        self._check_every_step = check_every_step
        self._checked_step = first_step
        self._wake = asyncio.Event()
        self._pool_call = asyncio.Lock()

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
        queries = [self._matchable(sequence) for sequence in sequences]
        return await self._ask(lambda: self._pool.match(queries))

    def load(self, sequence: Sequence, match: PrefixMatch) -> LaneLoad:
        """What this lane offers to a waiting sequence."""
        block_size = self.limits.block_size
        here = [*self.rows.values(), *self.assigned]
        promised = sum(self._to_the_end(other) - len(other.block_ids) for other in here)
        spare = self.num_free_blocks - promised - self.limits.watermark
        return LaneLoad(
            num_uncached_tokens=len(sequence.token_ids) - match.num_hits * block_size,
            num_queued_tokens=sum(
                len(other.token_ids) - other.num_computed_tokens for other in here
            ),
            num_running=len(here),
            has_room=not self.draining
            and len(here) < self.limits.max_num_seqs
            and self._to_the_end(sequence) - match.num_hits + match.num_free_hits <= spare,
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
        audit = await self._ask(self._pool.audit)
        tables = Counter(block for row in self.rows.values() for block in row.block_ids)
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
        reply = await self._ask(lambda: self._pool.commit(step.commit))
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

    async def _decide(self) -> _Step | None:
        self._dismiss_assigned()
        candidates = list(self.assigned)
        matches = await self.match(candidates) if candidates else []
        departing = [sequence for sequence in self.rows.values() if sequence.leaving]
        running = [sequence for sequence in self.rows.values() if not sequence.leaving]
        decision = schedule(
            self.limits,
            [self._running(sequence) for sequence in running],
            [self._waiting(*pair) for pair in zip(candidates, matches, strict=True)],
            self.num_free_blocks,
        )
        if not (departing or decision.scheduled or decision.admitted):
            return None
        commit = self._commit(decision, running, candidates, departing)
        return _Step(decision, running, candidates, departing, commit)

    def _commit(
        self,
        decision: Decision,
        running: list[Sequence],
        candidates: list[Sequence],
        departing: list[Sequence],
    ) -> Commit:
        for part in decision.scheduled:
            running[part.index].num_computed_tokens += part.num_scheduled_tokens
        return Commit(
            step=self._step + 1,
            withdrawals=tuple(
                block_id for sequence in departing for block_id in sequence.withdrawn_blocks
            ),
            publications=tuple(
                publication for sequence in running for publication in self._publish(sequence)
            ),
            runs=tuple(
                TokenRun(sequence.sequence_id, sequence.num_journaled, tuple(sequence.unjournaled))
                for sequence in (*running, *departing)
                if sequence.unjournaled
            ),
            departures=tuple(
                Departure(sequence.sequence_id, tuple(sequence.block_ids)) for sequence in departing
            ),
            appends=tuple(
                Append(running[part.index].sequence_id, part.num_new_blocks)
                for part in decision.scheduled
                if part.num_new_blocks
            ),
            admissions=tuple(
                self._admission(candidates[part.index], part.num_hits, part.num_scheduled_tokens)
                for part in decision.admitted
            ),
        )

    def _deliver(self, step: _Step) -> None:
        """Tells the gateways what Redis has now, and who has left."""
        for sequence in (*step.running, *step.departing):
            if token_ids := sequence.unjournaled:
                first_index = sequence.num_journaled
                sequence.num_journaled += len(token_ids)
                sequence.subscriber.deliver(sequence, first_index, token_ids)
        for sequence in step.departing:
            self._on_left(sequence)

    def _apply(self, step: _Step, reply: CommitReply) -> worker_pb2.BatchPlan:
        """Turns the reply into the plan; the lane's tables follow."""
        released = [self._release(sequence) for sequence in step.departing]
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
                self._admit(sequence, table, entry.num_hits)
                admitted.append((sequence, entry.num_scheduled_tokens))
        plan = build_plan(
            self._epoch,
            self._step,
            released,
            [sequence for sequence, _ in admitted],
            appended,
            [*scheduled, *((sequence.row or 0, count) for sequence, count in admitted)],
        )
        for sequence, num_tokens in admitted:
            sequence.num_computed_tokens += num_tokens
            sequence.num_published_blocks = sequence.num_computed_tokens // self.limits.block_size
        return plan

    def _take(self, result: worker_pb2.StepResult, plan: worker_pb2.BatchPlan) -> None:
        self._check_result(result, plan)
        for failure in result.failures:
            sequence = self.rows[failure.row]
            log.error("row failed", request=sequence.request_id, why=failure.reason)
            sequence.fail(failed(StatusCode.INTERNAL, "ROW_FAILED", failure.reason))
            sequence.blocks_are_sound = False
        for row, token_id in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            if not self.rows[row].leaving:
                self.rows[row].take(token_id)

    def _check_result(self, result: worker_pb2.StepResult, plan: worker_pb2.BatchPlan) -> None:
        """LaneLost unless each row that was due a token has one, or a reason why not."""
        if (result.epoch, result.step) != (plan.epoch, plan.step):
            raise LaneLost(
                f"the worker answered step {result.step} of epoch {result.epoch}, "
                f"not step {plan.step} of epoch {plan.epoch}"
            )
        due = {row for row in plan.schedule.rows if self.rows[row].is_computed}
        failing = {failure.row for failure in result.failures}
        sampled = sorted(result.sampled_rows)
        if sampled != sorted(due - failing) or len(sampled) != len(result.sampled_token_ids):
            raise LaneLost(f"the worker's result of step {result.step} is not that of its plan")
        if not failing <= set(plan.schedule.rows):
            raise LaneLost(f"the worker failed rows that step {result.step} did not run")

    # Rows

    def _admit(self, sequence: Sequence, table: Iterable[int], num_hits: int) -> None:
        self.assigned.remove(sequence)
        sequence.row = heapq.heappop(self._free_rows)
        sequence.block_ids = list(table)
        sequence.num_computed_tokens = num_hits * self.limits.block_size
        sequence.num_hit_blocks = num_hits
        sequence.num_cached_tokens = sequence.num_computed_tokens
        self.rows[sequence.row] = sequence

    def _release(self, sequence: Sequence) -> int:
        assert sequence.row is not None
        row, sequence.row = sequence.row, None
        sequence.block_ids = []
        heapq.heappush(self._free_rows, row)
        del self.rows[row]
        return row

    def _dismiss_assigned(self) -> None:
        """Lets go of those that wait here in vain."""
        if self.draining or any(sequence.leaving for sequence in self.assigned):
            stay = [] if self.draining else [other for other in self.assigned if not other.leaving]
            go = [sequence for sequence in self.assigned if sequence not in stay]
            self.assigned = stay
            self._on_given_back(go)

    # Sequences as the policy and the pool see them

    def _to_the_end(self, sequence: Sequence) -> int:
        return blocks_to_the_end(sequence.max_num_tokens, self.limits.block_size)

    def _matchable(self, sequence: Sequence) -> tuple[bytes, ...]:
        num_blocks = num_matchable_blocks(len(sequence.token_ids), self.limits.block_size)
        return self._hashes(sequence)[:num_blocks]

    def _hashes(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Of its full blocks; without prefix caching there is nothing to share."""
        return sequence.hashes() if self._enable_prefix_caching else ()

    def _running(self, sequence: Sequence) -> Running:
        return Running(
            num_tokens=len(sequence.token_ids),
            num_computed_tokens=sequence.num_computed_tokens,
            num_held_blocks=len(sequence.block_ids),
            max_num_tokens=sequence.max_num_tokens,
        )

    def _waiting(self, sequence: Sequence, match: PrefixMatch) -> Waiting:
        return Waiting(
            num_tokens=len(sequence.token_ids),
            max_num_tokens=sequence.max_num_tokens,
            block_hashes=self._hashes(sequence),
            num_hits=match.num_hits,
            num_free_hits=match.num_free_hits,
        )

    def _publish(self, sequence: Sequence) -> list[Publication]:
        """The blocks that are full, with known tokens, once the step being planned has run."""
        first = sequence.num_published_blocks
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        num_full = min(num_known // self.limits.block_size, len(sequence.block_ids))
        if num_full <= first:
            return []
        sequence.num_published_blocks = num_full
        hashes = self._hashes(sequence)[first:num_full]
        pairs = zip(sequence.block_ids[first:num_full], hashes, strict=False)
        return [Publication(*pair) for pair in pairs]

    def _admission(self, sequence: Sequence, num_hits: int, num_tokens: int) -> Admission:
        block_size = self.limits.block_size
        hashes = self._hashes(sequence)
        num_filled = num_hits + (num_tokens // block_size)
        num_blocks = -(-len(sequence.token_ids) // block_size)
        return Admission(
            sequence_id=sequence.sequence_id,
            num_output_tokens=sequence.num_journaled,
            hit_hashes=tuple(hashes[:num_hits]),
            num_new_blocks=num_blocks - num_hits,
            fill_hashes=tuple(hashes[num_hits:num_filled]),
        )

    async def _fold_journal(self) -> None:
        if self._step % FOLD_EVERY_STEPS == 0:
            await self._ask(lambda: self._fold(list(self.rows.values())))
            await self._ask(lambda: self._pool.trim_journal(self._step))

    async def _ask(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        """One call to the pool at a time; while Redis is away the lane waits for it."""
        async with self._pool_call:
            while True:
                try:
                    return await call()
                except StoreUnavailable as error:
                    log.warning("the lane waits for Redis", error=str(error))
                    await asyncio.sleep(REDIS_RETRY_S)
