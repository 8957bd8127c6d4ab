"""The loop that steps one lane."""

import asyncio
import time

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.view import Limits
from scheduler_svc.lane.assignments import Assignments
from scheduler_svc.lane.batch_window import BatchWindow
from scheduler_svc.lane.delivery import deliver
from scheduler_svc.lane.in_flight import InFlightSteps
from scheduler_svc.lane.journal_compaction import JournalCompaction
from scheduler_svc.lane.multi_step import MultiStep
from scheduler_svc.lane.options import LaneHooks, LaneOptions
from scheduler_svc.lane.plan import build_plan
from scheduler_svc.lane.pool_client import PoolClient
from scheduler_svc.lane.prompt_share import PromptShare
from scheduler_svc.lane.quarantine import Quarantine
from scheduler_svc.lane.results import StepAccounts, append_tokens, correct_counts, fail
from scheduler_svc.lane.sequence_table import SequenceTable
from scheduler_svc.lane.stall_watch import StallWatch
from scheduler_svc.lane.steady.decoding import LaneParts, SteadyDecoding
from scheduler_svc.lane.steady.entry import SteadyEntry
from scheduler_svc.lane.step_sender import StepSender
from scheduler_svc.lane.steps.step import Step
from scheduler_svc.lane.steps.step_builder import StepBuilder
from scheduler_svc.lane.worker_stream import LaneTaken, WorkerInfo, WorkerStream
from scheduler_svc.store.types import Commit, PrefixMatch

IDLE_CHECK_S = 5.0


class LaneLoop:
    """Decides, commits and sends steps, up to `pipeline_depth` plans ahead, and completes them."""

    def __init__(
        self,
        worker: WorkerInfo,
        stream: WorkerStream,
        epoch: int,
        limits: Limits,
        table: SequenceTable,
        pool: PoolClient,
        assignments: Assignments,
        options: LaneOptions,
        hooks: LaneHooks,
    ) -> None:
        self._worker = worker
        self._stream = stream
        self._epoch = epoch
        self._limits = limits
        self._table = table
        self._pool = pool
        self._assignments = assignments
        self._stats = pool.stats
        self._options = options
        self._hooks = hooks
        self.in_flight = InFlightSteps()
        self.quarantine = Quarantine(table)
        self.compaction = JournalCompaction(pool, hooks.compact)
        self.batch_window = BatchWindow(options.multi_step_s > 0, hooks.since_last_arrival_s)
        self._most_in_flight = options.pipeline_depth_for(worker)
        self._num_micro_batches = options.num_micro_batches_for(worker)
        self._multi_step = MultiStep(options.max_rounds_s(worker), hooks.since_last_arrival_s)
        self._prompt_share = PromptShare(options.max_prefill_s)
        self._results = StepAccounts(
            worker.incarnation, table, self.quarantine, self.batch_window, self._multi_step,
            self._prompt_share, pool.stats, hooks.step_completed,
        )  # fmt: skip
        self._sender = StepSender(epoch, stream, self.in_flight, self.batch_window, pool.stats)
        # Sequences with tokens that are not committed yet, and those whose rows failed.
        self._uncommitted: dict[Sequence, None] = {}
        self._failed: list[Sequence] = []
        self._window_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._check_due = False
        self._halting = False
        self._wake = asyncio.Event()
        self._stall_watch = StallWatch(table, self.wake)
        parts = LaneParts(
            epoch, stream, pool, table.rows, self.in_flight, self._sender, hooks, self._results,
            is_interrupted=self._wake.is_set, interrupt=self.wake, stepped=self._stepped,
            are_rounds_possible=lambda: self._multi_step.is_possible() and not hooks.has_waiting(),
        )  # fmt: skip
        self._entry = SteadyEntry(parts, table, assignments, limits, options, self._most_in_flight)
        # While the loop waits, and the lane is in a steady state.
        self._steady: SteadyDecoding | None = None

    def wake(self) -> None:
        self._wake.set()

    def stream_changed(self) -> None:
        """A result has arrived, or the stream is lost."""
        if isinstance(self._stream.lost, LaneTaken):
            self._hooks.lane_taken()
        if self._steady is None or not self._steady.advance():
            self.wake()

    def halt(self) -> None:
        self._halting = True
        self.wake()

    async def run(self) -> None:
        in_flight, timeout_s = self.in_flight, self._options.step_timeout_s
        watching = asyncio.create_task(
            self._stream.watch(lambda: in_flight.oldest_sent_at, timeout_s, self.wake)
        )
        try:
            while await self._advance():
                pass
            await self._journal_rest()
        finally:
            watching.cancel()
            self.compaction.cancel()
            for timer in filter(None, (self._idle_timer, self._window_timer)):
                timer.cancel()

    async def _advance(self) -> bool:
        """Take one step, or wait for work. False: the lane is drained or halted."""
        self._wake.clear()
        if await self._decode_steadily():
            return True
        self._complete_steps()
        if self._stream.lost:
            raise self._stream.lost
        if self._may_step() and await self._step():
            self._stall_watch.stepped()
            return True
        is_over = self._halting or (self._assignments.draining and self._table.is_empty)
        if is_over and not self.in_flight:
            return False
        await self._wait_for_work()
        return True

    async def _decode_steadily(self) -> bool:
        """Leave the results to a steady lane until something else happens. False if the lane is in
        another state, or the next result changes it."""
        if self._halting or self._uncommitted or self._failed or self._stream.lost:
            return False
        steady = self._entry.enter()
        if steady is None:
            return False
        if self._stream.next_result is not None and not steady.advance():
            await steady.stop()
            return False
        self._steady = steady
        try:
            await self._wake.wait()
        except BaseException:
            steady.abandon()
            raise
        finally:
            self._steady = None
        await steady.stop()
        self.compaction.start_if_due(self._pool.last_step, self._table.all_admitted())
        await self._check_if_due()
        return True

    # Waiting

    def _may_step(self) -> bool:
        """Whether to decide a step: the pipeline has room, and the batch window is closed. A
        timer wakes the loop at the window's end."""
        if self._window_timer is not None:
            self._window_timer.cancel()
            self._window_timer = None
        if self._halting or len(self.in_flight) >= self._pipeline_depth:
            return False
        remaining_s = self.batch_window.remaining_s()
        if remaining_s <= 0 or not self._assignments.can_batch_more():
            return True
        self._window_timer = asyncio.get_running_loop().call_later(remaining_s, self.wake)
        return False

    @property
    def _pipeline_depth(self) -> int:
        """Maximum plans in flight: one while a suspect runs alone."""
        return 1 if self.quarantine.suspect() else self._most_in_flight

    async def _wait_for_work(self) -> None:
        """Wait for work; check the pool once when the lane has been idle for a while."""
        if self._idle_timer is None:
            call_later, step = asyncio.get_running_loop().call_later, self._pool.last_step
            self._idle_timer = call_later(IDLE_CHECK_S, self._check_if_idle, step)
        with self._stall_watch.waiting(len(self.in_flight)):
            await self._wake.wait()
        await self._check_if_due()

    async def _check_if_due(self) -> None:
        if self._check_due:
            self._check_due = False
            await self._pool.check()

    def _stepped(self, step: int) -> None:
        """A step was sent without the loop: wake it up for what it does after some steps."""
        self._check_due |= self._options.check_every_step
        if self._check_due or self.compaction.is_due(step):
            self.wake()

    def _check_if_idle(self, step: int) -> None:
        self._idle_timer = None
        if step == self._pool.last_step != self._pool.checked_step:
            self._check_due = True
            self.wake()

    # Steps

    async def _step(self) -> bool:
        """Decide one step, commit it, notify subscribers, send its plan. False: nothing to do."""
        stats = self._stats
        started, waited_s = time.perf_counter(), stats.redis_s
        suspect = self.quarantine.suspect()
        candidates = await self._assignments.candidates()
        step = self._decide(candidates, suspect)
        if step.is_empty and suspect is not None:
            # There is no room for the suspect: the other sequences continue.
            step = self._decide(candidates, None)
        if step.is_empty:
            return False
        self._assignments.admitting = step.admitting
        reply = await self._pool.commit(step.commit())
        self._notify(step.builder)
        scheduled = step.apply(reply)
        self._assignments.admitting = []
        redis_s = stats.redis_s - waited_s
        scheduling_s = time.perf_counter() - started - redis_s
        contents = step.builder.plan
        if not contents.is_empty:
            # First: the worker's time for the step begins when it is counted.
            await self._hooks.wait_for_lease()
        in_flight = self._sender.count(
            self._pool.last_step,
            scheduled,
            contents.num_tokens,
            contents.num_prefill_tokens,
            max(contents.num_rounds, default=1),
            scheduling_s,
            redis_s,
        )
        if not contents.is_empty:
            plan = build_plan(self._epoch, in_flight.step, contents)
            self._sender.send(in_flight, worker_pb2.ExecuteRequest(plan=plan))
        if step.frees_capacity:
            self._hooks.capacity_freed()
        self.compaction.start_if_due(self._pool.last_step, self._table.all_admitted())
        if self._options.check_every_step:
            await self._pool.check()
        return True

    def _builder(self) -> StepBuilder:
        return StepBuilder(
            step_number=self._pool.last_step + 1,
            rows=self._table.rows,
            block_size=self._limits.block_size,
            enable_prefix_caching=self._options.enable_prefix_caching,
            num_free_blocks=self._pool.num_free_blocks,
        )

    def _decide(
        self, candidates: list[tuple[Sequence, PrefixMatch]], suspect: Sequence | None
    ) -> Step:
        num_usable = self._worker.num_blocks - 1
        step = Step(
            self._builder(),
            self._table,
            self._limits,
            num_usable,
            self._stats,
            self._num_micro_batches,
            self._prompt_share.max_tokens,
            self.in_flight.num_rounds,
        )
        uncommitted, self._uncommitted = self._uncommitted, {}
        failed, self._failed = self._failed, []
        step.release.release_ended(failed)
        step.beams.fork()
        if self._assignments.draining and self._hooks.has_other_lane(self._worker.incarnation):
            step.release.preempt_all()
        if suspect is None:
            num_rounds = self._num_rounds(step.builder)
            step.decide([pair for pair in candidates if not pair[0].is_suspect], num_rounds)
        else:
            step.decide_alone(suspect, candidates)
        step.builder.journal(uncommitted)
        return step

    def _num_rounds(self, builder: StepBuilder) -> int:
        """Rounds that decodes may run in a plan without anything else; 1 if a sequence waits, or
        if stages wait for the next round of other rows."""
        table = self._table
        if self._num_micro_batches > 1:
            return 1
        has_waiting = table.assigned or table.swapped or table.is_preempting or builder.requeued
        if has_waiting or self._hooks.has_waiting():
            return 1
        return self._multi_step.num_rounds(table.rows)

    def _notify(self, builder: StepBuilder) -> None:
        """Deliver journaled tokens, report finished sequences, requeue preempted ones."""
        deliver(builder)
        for sequence in builder.finished:
            self._hooks.sequence_finished(sequence)
        # The record of a request is ended with its last choice; the journal may be trimmed earlier.
        self.compaction.uncompacted += [one for one in builder.finished if one.group.num_live]
        if builder.requeued:
            # Sequences assigned later must not overtake them.
            assigned, self._table.assigned = self._table.assigned, []
            self.compaction.uncompacted += builder.requeued
            self._hooks.requeue([*builder.requeued, *assigned])

    async def _journal_rest(self) -> None:
        """Journal and deliver tokens that no step has committed."""
        builder = self._builder()
        builder.journal(self._uncommitted)
        if builder.journaled:
            commit = Commit(
                builder.step_number,
                publications=builder.publications,
                token_ranges=builder.token_ranges,
            )
            await self._pool.commit(commit)
            deliver(builder)

    # Results

    def _complete_steps(self) -> None:
        """Complete every step whose result has arrived."""
        for result in self._stream.results():
            started = time.perf_counter()
            completed = self.in_flight.complete(result)
            self._results.begin(completed.in_flight, completed.sequences)
            self._uncommitted.update(dict.fromkeys(append_tokens(completed)))
            correct_counts(completed, self.in_flight)
            if self._table.traced.in_prefill:
                self._table.traced.complete_prefills()
            for sequence, error in completed.failures:
                fail(sequence, error)
                self._failed.append(sequence)
            self._results.end(completed.in_flight, completed.sequences, result, started)
