"""One worker's lane: its sequences, and the loop that steps them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import TypeVar

import structlog
from grpc import StatusCode

from quire.internal.v1 import worker_pb2
from quire.service.errors import failed
from scheduler_svc.core.placement import LaneBudget
from scheduler_svc.core.policy import blocks_for
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import LaneStats, StepSample
from scheduler_svc.core.view import Limits
from scheduler_svc.lanes.company import Company
from scheduler_svc.lanes.deliveries import deliver
from scheduler_svc.lanes.draft import Draft
from scheduler_svc.lanes.flights import Flight, Flights, Ran
from scheduler_svc.lanes.folding import Folding
from scheduler_svc.lanes.multi_step import MultiStep
from scheduler_svc.lanes.options import LaneHooks, LaneOptions
from scheduler_svc.lanes.patience import Patience
from scheduler_svc.lanes.plan import Changes, build_plan
from scheduler_svc.lanes.roster import Roster
from scheduler_svc.lanes.rows import Rows
from scheduler_svc.lanes.step import Step
from scheduler_svc.lanes.stream import LaneLost, Worker, WorkerSilent, WorkerStream
from scheduler_svc.lanes.trial import Trial
from scheduler_svc.lanes.watch import watch
from scheduler_svc.store.audit import PoolAudit
from scheduler_svc.store.errors import PoolFault
from scheduler_svc.store.hashing import num_matchable_blocks
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import Commit, PrefixMatch

log = structlog.get_logger()

IDLE_CHECK_S = 5.0

_UNKNOWN = PrefixMatch(num_hits=0, num_free_hits=0)
_Reply = TypeVar("_Reply")


class Lane:
    """The sequences of one worker, and up to `depth` plans that it has not answered.

    A sequence leaves its row in one way, whatever the cause: the next commit returns its blocks,
    the next plan releases the row. What differs is where it goes from there.
    """

    def __init__(
        self,
        worker: Worker,
        address: str,
        stream: WorkerStream,
        pool: Pool,
        epoch: int,
        first_step: int,
        limits: Limits,
        options: LaneOptions,
        hooks: LaneHooks,
    ) -> None:
        self.worker = worker
        self.address = address
        self.limits = limits
        self.stats = LaneStats()
        self.roster = Roster(limits.max_num_seqs, worker.num_host_blocks)
        self.draining = worker.draining
        self.num_free_blocks = worker.num_blocks - 1
        self._stream = stream
        self._pool = pool
        self._epoch = epoch
        self._step = first_step
        self._options = options
        self._hooks = hooks
        self._patience = Patience()
        self._checked_step = first_step
        self._flights = Flights()
        self._trial = Trial(self.roster)
        # All plans in flight together stay far below the time in which a worker has to answer.
        most_s = options.step_timeout_s / (4 * options.depth)
        self._multi_step = MultiStep(min(options.multi_step_s, most_s), hooks.quiet_s)
        self._company = Company(options.multi_step_s > 0, hooks.quiet_s)
        self._company_timer: asyncio.TimerHandle | None = None
        self._halting = False
        # Sequences with tokens of which the pool has not heard, and those whose rows failed.
        self._fresh: dict[Sequence, None] = {}
        self._failed: list[Sequence] = []
        # What the caches were found to hold of sequences assigned here, until it is used.
        self._hints: dict[Sequence, PrefixMatch] = {}
        self._folding = Folding(pool, self._patience, hooks.fold, first_step)
        self._idle_timer: asyncio.TimerHandle | None = None
        self._has_idled = False
        self._wake = asyncio.Event()

    # What the rest of the scheduler asks of a lane

    @property
    def rows(self) -> Rows:
        return self.roster.rows

    @property
    def assigned(self) -> list[Sequence]:
        return self.roster.assigned

    @property
    def num_swapped(self) -> int:
        return self.roster.num_swapped

    @property
    def is_empty(self) -> bool:
        return self.roster.is_empty and not self.roster.assigned

    @property
    def num_admissible_blocks(self) -> int:
        """Blocks that new requests may have when nothing runs."""
        return self.worker.num_blocks - 1 - self.limits.watermark

    def budget(self) -> LaneBudget:
        """What the lane has left for others to come."""
        roster, block_size = self.roster, self.limits.block_size
        budget = LaneBudget(
            limits=self.limits,
            num_rows=roster.num_wanted_rows,
            num_free_blocks=self.num_free_blocks,
        )
        for row in roster.rows:
            # Decodes have one token to compute, and are not queued.
            if (num_tokens := row.num_tokens - row.num_computed_tokens) > 1:
                budget.queue(num_tokens)
        for sequence in roster.assigned:
            known = self._hints.get(sequence, _UNKNOWN)
            budget.queue(len(sequence.token_ids) - known.num_hits * block_size)
            budget.num_free_blocks -= blocks_for(len(sequence.token_ids), block_size)
            budget.num_free_blocks += known.num_hits - known.num_free_hits
        return budget

    @property
    def is_open(self) -> bool:
        """More requests may come."""
        return not self.draining and self.budget().is_open

    def assign(self, sequence: Sequence, match: PrefixMatch | None = None) -> None:
        """Gives the lane a sequence to admit; `match` is what its cache holds of it."""
        if self.is_empty:
            self._company.first_came()
        self.roster.assign(sequence)
        sequence.place_on(self.worker.incarnation)
        if match is not None:
            self._hints[sequence] = match
        self.wake()

    def wake(self) -> None:
        """There is something to do, or somebody left."""
        self._wake.set()

    def drain(self) -> None:
        """No new requests from here on; `run` returns when the last one has left."""
        if not self.draining:
            self.draining = True
            self.wake()

    def halt(self) -> None:
        """No plan more: `run` returns when those in flight have come back and their tokens are
        delivered."""
        self._halting = True
        self.wake()

    def blame(self, why: LaneLost) -> None:
        """The worker is lost: suspects are those whose steps it did not finish."""
        if not self.draining:
            is_dead = not isinstance(why, WorkerSilent)
            self._trial.blame(self._flights.sequences, is_dead)

    @property
    def step(self) -> int:
        """The last one that the pool has heard of."""
        return self._step

    @property
    def recalled(self) -> list[Sequence]:
        """Sequences that are elsewhere now, with tokens that only this pool's journal may have."""
        return self._folding.recalled

    def matchable(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the blocks that may be hits."""
        if not self._options.enable_prefix_caching or sequence.computes_prompt:
            return []
        num_blocks = num_matchable_blocks(len(sequence.token_ids), self.limits.block_size)
        return sequence.hashes()[:num_blocks]

    @property
    def pool(self) -> Pool:
        return self._pool

    async def audit(self) -> PoolAudit:
        """The pool's blocks, now."""
        return await self._patience.ask(self._pool.audit)

    async def reset_prefix_cache(self) -> int:
        """Forgets every hash; the number of them."""
        return await self._patience.ask(self._pool.reset_prefix_cache)

    # The loop

    async def run(self) -> None:
        """Steps until the lane is drained or halted. LaneLost or a StoreError ends it before."""
        flights, timeout_s = self._flights, self._options.step_timeout_s
        watching = asyncio.create_task(
            watch(self._stream, lambda: flights.oldest_sent_at, timeout_s, self.wake)
        )
        try:
            while await self._advance():
                pass
            await self._journal_rest()
        finally:
            watching.cancel()
            self._folding.cancel()
            for timer in (self._idle_timer, self._company_timer):
                if timer is not None:
                    timer.cancel()

    async def _advance(self) -> bool:
        """Goes one step on, or waits for a reason to. False: the lane is drained."""
        self._wake.clear()
        self._land()
        if self._stream.lost:
            raise self._stream.lost
        if self._may_step() and await self._turn():
            return True
        if not self._flights and (self._halting or (self.draining and self.is_empty)):
            return False
        await self._rest()
        return True

    def _may_step(self) -> bool:
        """Whether to look for something to do: not if nothing more is sent now, nor while all of it
        waits for company, at the end of which the lane is woken."""
        if self._company_timer is not None:
            self._company_timer.cancel()
            self._company_timer = None
        if self._halting or len(self._flights) >= self._depth:
            return False
        left_s = self._company.left_s()
        if left_s <= 0 or not self._awaits_company():
            return True
        self._company_timer = asyncio.get_running_loop().call_later(left_s, self.wake)
        return False

    def _awaits_company(self) -> bool:
        """Whether all that the lane has are patient, and more may come."""
        roster = self.roster
        if roster.swapped or roster.late:
            return False
        self._dismiss_assigned()
        everybody = [*roster.assigned, *roster.rows]
        if not everybody or not self.is_open:
            return False
        return all(
            sequence.group.is_patient and not (sequence.is_suspect or sequence.is_over)
            for sequence in everybody
        )

    @property
    def _depth(self) -> int:
        """Whoever is tried alone is so from the first plan on that the worker has."""
        return 1 if self._trial.accused() else self._options.depth

    async def _journal_rest(self) -> None:
        """Journals and delivers what nobody commits any more."""
        draft = self._draft()
        draft.journal(self._fresh)
        if draft.journaled:
            commit = Commit(draft.number, publications=draft.publications, runs=draft.runs)
            await self._ask(lambda: self._pool.commit(commit))
            self._step = draft.number
            deliver(draft)

    async def _rest(self) -> None:
        """Waits for something to do; a lane that rests for long enough checks itself once."""
        if self._idle_timer is None:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(IDLE_CHECK_S, self._idled, self._step)
        await self._wake.wait()
        if self._has_idled:
            self._has_idled = False
            await self.check_integrity()

    def _idled(self, step: int) -> None:
        self._idle_timer = None
        if step == self._step != self._checked_step:
            self._has_idled = True
            self.wake()

    async def check_integrity(self) -> None:
        """PoolFault unless the pool's references are exactly the lane's tables and holds."""
        audit = await self.audit()
        tables = +self.roster.rows.references
        if audit.references != tables or audit.num_free != self.num_free_blocks:
            raise PoolFault(
                f"after step {self._step} the pool holds {audit.num_held} blocks and has "
                f"{audit.num_free} free; the lane's tables hold {len(tables)}, "
                f"its count says {self.num_free_blocks} free"
            )
        self._checked_step = self._step

    async def _turn(self) -> bool:
        """Decides one step, commits it, tells of it, sends its plan. False: nothing to do."""
        started, waited_s = time.perf_counter(), self.stats.redis_s
        accused = self._trial.accused()
        is_asked = self.roster.assigned or self._hints
        candidates = await self._candidates() if is_asked else []
        step = self._decide(candidates, accused)
        if step.is_empty and accused is not None:
            # There is no room for it: the others go on.
            step = self._decide(candidates, None)
        if step.is_empty:
            return False
        commit = step.commit()
        # A repeated commit gets the stored reply: asking again is safe.
        reply = await self._ask(lambda: self._pool.commit(commit))
        self._step = commit.step
        self.num_free_blocks = reply.num_free_blocks
        self._tell(step.draft)
        ran = step.apply(reply)
        redis_s = self.stats.redis_s - waited_s
        scheduling_s = time.perf_counter() - started - redis_s
        changes = step.draft.changes
        self._count(changes, scheduling_s)
        if not changes.is_empty:
            await self._send(changes, ran, scheduling_s, redis_s)
        if step.makes_room:
            self._hooks.room()
        self._folding.look(self._step, self.roster.everybody())
        if self._options.check_every_step:
            await self.check_integrity()
        return True

    def _draft(self) -> Draft:
        return Draft(
            number=self._step + 1,
            rows=self.roster.rows,
            block_size=self.limits.block_size,
            hashed=self._options.enable_prefix_caching,
            num_free_blocks=self.num_free_blocks,
        )

    def _decide(
        self, candidates: list[tuple[Sequence, PrefixMatch]], accused: Sequence | None
    ) -> Step:
        usable = self.worker.num_blocks - 1
        step = Step(self._draft(), self.roster, self.limits, usable, self.stats)
        fresh, self._fresh = self._fresh, {}
        failed, self._failed = self._failed, []
        step.settle(failed)
        if self.draining and self._hooks.others_open(self.worker.incarnation):
            step.recall()
        if accused is None:
            num_rounds = self._num_rounds(step.draft)
            step.decide([pair for pair in candidates if not pair[0].is_suspect], num_rounds)
        else:
            step.try_alone(accused, candidates)
        step.journal(fresh)
        return step

    def _num_rounds(self, draft: Draft) -> int:
        """How often decodes may run in a plan where nothing else does."""
        roster = self.roster
        somebody_waits = roster.assigned or roster.swapped or roster.is_recalling or draft.recalled
        if somebody_waits or self._hooks.somebody_waits():
            return 1
        return self._multi_step.num_rounds(roster.rows)

    @property
    def _admits(self) -> bool:
        """Worth asking the cache: nobody comes before those assigned, and there are rows."""
        roster = self.roster
        return not (
            roster.swapped or roster.is_recalling or len(roster.rows) >= self.limits.max_num_seqs
        )

    async def _candidates(self) -> list[tuple[Sequence, PrefixMatch]]:
        """Those who wait for a row, with what the cache holds of them."""
        self._dismiss_assigned()
        if not self._admits:
            return []
        waiting = list(self.roster.assigned)
        unknown = [sequence for sequence in waiting if sequence not in self._hints]
        if unknown:
            queries = [self.matchable(sequence) for sequence in unknown]
            matches = await self._ask(lambda: self._pool.match(queries))
            self._hints.update(zip(unknown, matches, strict=True))
            self._dismiss_assigned()
        hints, self._hints = self._hints, {}
        # Whoever came meanwhile has no hint yet, and is not to be passed.
        known = takewhile(lambda other: other in hints, self.roster.assigned)
        return [(other, hints[other]) for other in known]

    async def _ask(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        """One call of Redis for a step, waited for as long as it takes."""
        started = time.perf_counter()
        reply = await self._patience.ask(call)
        self.stats.num_redis_calls += 1
        self.stats.redis_s += time.perf_counter() - started
        return reply

    def _tell(self, draft: Draft) -> None:
        """Tells what Redis has now, and who has left; sends back who has to wait again."""
        deliver(draft)
        for sequence in draft.left:
            self._hooks.left(sequence)
        if draft.recalled:
            # Those who were assigned later must not pass them.
            assigned, self.roster.assigned = self.roster.assigned, []
            self._folding.add(draft.recalled)
            self._hooks.given_back([*draft.recalled, *assigned])

    async def _send(self, changes: Changes, ran: Ran, scheduling_s: float, redis_s: float) -> None:
        flight = Flight(
            epoch=self._epoch,
            step=self._step,
            ran=ran,
            num_tokens=changes.num_tokens,
            num_rounds=max(changes.num_rounds, default=1),
            sent_at=time.perf_counter(),
            scheduling_s=scheduling_s,
            redis_s=redis_s,
        )
        await self._hooks.may_send()
        self._flights.start(flight)
        if ran.sequences:
            self._company.sent(flight.step)
        await self._stream.send(build_plan(self._epoch, self._step, changes))

    def _land(self) -> None:
        """Takes every result that has come."""
        for result in self._stream.results():
            started = time.perf_counter()
            landing = self._flights.land(result)
            self.roster.landed_step = landing.flight.step
            self._company.landed(landing.flight.step)
            fresh = self._fresh
            self._trial.acquit(landing.sequences)
            all_logprobs = iter(landing.logprobs)
            for sequence, token_id in zip(landing.sequences, landing.token_ids, strict=True):
                logprobs = next(all_logprobs, b"")
                # What was sampled behind an end is dropped.
                if sequence.end is None and sequence.group.error is None:
                    token_ids = sequence.token_ids
                    token_ids.append(token_id)
                    if logprobs:
                        sequence.logprobs += logprobs
                    fresh[sequence] = None
                    if (
                        len(token_ids) >= sequence.max_num_tokens
                        or token_id in sequence.stop_token_ids
                    ):
                        sequence.close()
            for sequence, reason in landing.failures:
                self._fail(sequence, reason)
            self.stats.num_sampled_tokens += len(landing.token_ids)
            busy_ns = _busy_ns(result.times)
            # A plan that ran no rows, or failed ones alone, says nothing.
            if landing.token_ids:
                round_s = busy_ns / landing.flight.num_rounds / 1e9
                self._multi_step.landed(round_s)
                if landing.flight.num_tokens == len(landing.flight.ran.due):
                    self._company.decoded(round_s)
            self.stats.worker_idle_ns += result.times.waiting_ns
            self.stats.worker_busy_ns += busy_ns
            self.stats.worker_starting_ns += result.times.starting_ns
            self.stats.scheduling_s += time.perf_counter() - started
            self._hooks.stepped(_sample(self.worker.incarnation, landing.flight, started))

    def _fail(self, sequence: Sequence, reason: str) -> None:
        if sequence.group.error is None:
            log.error("row failed", request=sequence.group.key.request_id, why=reason)
        sequence.group.fail(failed(StatusCode.INTERNAL, "ROW_FAILED", reason))
        self._failed.append(sequence)

    def _dismiss_assigned(self) -> None:
        """Lets go of those that wait here in vain."""
        assigned = self.roster.assigned
        if self.draining or any(sequence.is_over for sequence in assigned):
            stay = [] if self.draining else [other for other in assigned if not other.is_over]
            go = [sequence for sequence in assigned if sequence not in stay]
            self.roster.assigned = stay
            for sequence in go:
                self._hints.pop(sequence, None)
            self._hooks.given_back(go)

    def _count(self, changes: Changes, scheduling_s: float) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += changes.num_tokens
        if not changes.num_rounds:
            # Whoever computes one token decodes, but for the last tokens of some prompts.
            num_decodes = changes.num_scheduled_tokens.count(1)
            stats.num_prefill_tokens += changes.num_tokens - num_decodes
        stats.scheduling_s += scheduling_s


def _busy_ns(times: worker_pb2.StepTimes) -> int:
    return times.preparing_ns + times.forward_ns + times.sampling_ns


def _sample(incarnation: int, flight: Flight, landed_at: float) -> StepSample:
    return StepSample(
        worker=incarnation,
        scheduling_s=flight.scheduling_s,
        redis_s=flight.redis_s,
        step_s=landed_at - flight.sent_at,
        num_scheduled_tokens=flight.num_tokens,
    )
