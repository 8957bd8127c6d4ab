"""The steps of a steady lane, as callbacks of the result and of the commit's reply."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.in_flight import InFlightStep, InFlightSteps, ScheduledRows
from scheduler_svc.lane.options import LaneHooks
from scheduler_svc.lane.pool_client import PoolClient
from scheduler_svc.lane.results import StepAccounts
from scheduler_svc.lane.sequence_table import Rows
from scheduler_svc.lane.steady.columns import DecodeColumns
from scheduler_svc.lane.step_sender import StepSender
from scheduler_svc.lane.worker_stream import LaneLost, WorkerStream
from scheduler_svc.store.types import Commit, CommitReply, Publication, TokenRanges

# Completed steps are recorded so many at a time: most of the cost of recording one is that of
# running rarely used code.
_MAX_TAKEN: Final = 16


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What the steps of a lane work on."""

    epoch: int
    stream: WorkerStream
    pool: PoolClient
    rows: Rows
    in_flight: InFlightSteps
    sender: StepSender
    hooks: LaneHooks
    results: StepAccounts
    # Whether the loop has work that a steady lane does not have.
    is_interrupted: Callable[[], bool]
    interrupt: Callable[[], None]
    # A step was sent.
    stepped: Callable[[int], None]
    # Whether the loop would send plans of several rounds now, for rows that allow it.
    are_rounds_possible: Callable[[], bool]


@dataclass(slots=True)
class _Step:
    """The step in progress, from its result to its plan."""

    number: int
    publications: list[Publication]
    first_indices: list[int]
    next_indices: list[int]
    token_ids: list[int]
    growing: list[Sequence]
    scheduling_s: float = 0.0
    begun_at: float = 0.0  # of time.perf_counter
    redis_s: float = 0.0
    # None until Redis has replied, or if the commit must be repeated.
    reply: CommitReply | None = None
    is_applied: bool = False


class SteadyDecoding:
    """One plan is sent per result. `advance` takes a result only if nothing else has to be done."""

    def __init__(self, columns: DecodeColumns, parts: LaneParts, allows_rounds: bool) -> None:
        """`allows_rounds`: none of the rows gets its tokens one by one."""
        self._allows_rounds = allows_rounds
        self._columns = columns
        self._parts = parts
        self._commits = parts.pool.decode_commits(
            columns.sequence_ids, columns.next_indices, self._committed
        )
        self._scheduled = ScheduledRows(
            columns.rows, columns.sequences, columns.rows, columns.sequences
        )
        self._request = worker_pb2.ExecuteRequest()
        plan = self._request.plan
        plan.epoch = parts.epoch
        plan.schedule.rows.extend(columns.rows)
        plan.schedule.num_scheduled_tokens.extend([1] * len(columns.rows))
        self._step: _Step | None = None
        # Completed plans that are not recorded yet, with their results and when these were taken.
        self._taken: list[tuple[InFlightStep, worker_pb2.StepResult, float]] = []
        self._is_abandoned = False
        # An unexpected one of a callback; `stop` raises it.
        self._error: Exception | None = None

    # A result

    def advance(self) -> bool:
        """Take the next result and begin the next step; False, with nothing changed, if the loop
        has to take it."""
        try:
            return self._advance()
        except Exception as error:
            self._error = error
            return False

    def _advance(self) -> bool:
        parts, columns = self._parts, self._columns
        if self._step is not None:
            # Its result follows the step in progress.
            return True
        started = time.perf_counter()
        result, in_flight = parts.stream.next_result, parts.in_flight.oldest
        growing = columns.growing()
        if (
            result is None
            or in_flight is None
            or parts.stream.lost is not None
            or parts.is_interrupted()
            or not parts.pool.is_idle
            or columns.num_left < 1
            or len(growing) > parts.pool.num_free_blocks
            or (self._allows_rounds and parts.are_rounds_possible())
        ):
            return False
        token_ids = list(result.sampled_token_ids)
        if not self._is_expected(result, in_flight, token_ids) or columns.has_stop(token_ids):
            return False
        parts.stream.take_result()
        parts.in_flight.take_oldest()
        self._taken.append((in_flight, result, started))
        if len(self._taken) == _MAX_TAKEN:
            self._record()
        self._begin(token_ids, growing, started)
        return True

    def _record(self) -> None:
        """Record the steps completed since the last call."""
        taken, self._taken = self._taken, []
        for in_flight, result, started in taken:
            self._parts.results.begin(in_flight, self._columns.sequences)
            self._parts.results.end(in_flight, self._columns.sequences, result, started)

    def _is_expected(
        self, result: worker_pb2.StepResult, in_flight: InFlightStep, token_ids: list[int]
    ) -> bool:
        """Whether each row has one token, and nothing more is reported."""
        rows = self._columns.rows
        return (
            result.step == in_flight.step
            and result.epoch == in_flight.epoch
            and len(token_ids) == len(rows)
            and list(result.sampled_rows) == rows
            and not (
                result.failures
                or result.lookahead_rows
                or result.forced_indices
                or result.HasField("logprobs")
                or result.HasField("prompt_logprobs")
            )
        )

    def _begin(self, token_ids: list[int], growing: list[Sequence], started: float) -> None:
        """Decide the next step and begin its commit."""
        parts, columns = self._parts, self._columns
        number = parts.pool.last_step + 1
        publications = columns.advance(token_ids, number)
        firsts = columns.next_indices
        nexts = [index + 1 for index in firsts]
        step = _Step(number, publications, firsts, nexts, token_ids, growing)
        self._step = step
        step.begun_at = time.perf_counter()
        step.scheduling_s = step.begun_at - started
        parts.pool.begun()
        if not self._commits.begin(number, publications, nexts, token_ids, len(growing)):
            self._committed(None)

    # The commit's reply

    def _committed(self, reply: CommitReply | None) -> None:
        step, parts = self._step, self._parts
        assert step is not None
        step.redis_s = time.perf_counter() - step.begun_at
        step.reply = reply
        parts.pool.ended(step.number, reply, step.redis_s)
        if not self._is_abandoned:
            try:
                is_complete = self._complete(step)
            except Exception as error:
                self._error = error
                is_complete = False
            if not is_complete:
                parts.interrupt()

    def _complete(self, step: _Step) -> bool:
        """Deliver, and send the plan; continue with the next result if it is there. False if the
        loop has to complete the step, or to take the result."""
        parts = self._parts
        if step.reply is None or parts.is_interrupted():
            return False
        self._apply(step, step.reply)
        if not parts.hooks.may_send():
            return False
        try:
            self._send(step)
        except LaneLost:
            # `stream.lost` has it, too, and ends the loop.
            return False
        return parts.stream.next_result is None or self.advance()

    def _apply(self, step: _Step, reply: CommitReply, may_be_ended: bool = False) -> None:
        """Deliver the tokens, and give the rows their blocks. `may_be_ended`: sequences may have
        been ended since the result."""
        parts, columns = self._parts, self._columns
        started = time.perf_counter()
        step.is_applied = True
        columns.journaled(step.next_indices)
        columns.deliver(step.first_indices, step.token_ids, may_be_ended)
        if step.growing:
            columns.grow(step.growing, reply.taken)
            parts.rows.add_references(reply.taken)
            appends = self._request.plan.appends
            appends.rows.extend([other.row for other in step.growing if other.row is not None])
            appends.block_ids.extend(reply.taken)
            appends.num_blocks.extend([1] * len(step.growing))
        step.scheduling_s += time.perf_counter() - started

    def _send(self, step: _Step) -> None:
        """Send the plan. LaneLost if the stream has ended."""
        parts, request = self._parts, self._request
        self._step = None
        in_flight = parts.sender.count(
            step.number,
            self._scheduled,
            num_tokens=len(self._columns.rows),
            num_prefill_tokens=0,
            num_rounds=1,
            scheduling_s=step.scheduling_s,
            redis_s=step.redis_s,
        )
        request.plan.step = step.number
        parts.sender.send(in_flight, request)
        request.plan.ClearField("appends")
        parts.stepped(step.number)

    # The end of the steady state

    def abandon(self) -> None:
        """End without completing the step in progress."""
        self._is_abandoned = True
        self._finish()

    def _finish(self) -> None:
        """Record the completed steps, and bring the counts of the sequences up to date."""
        self._record()
        self._columns.sync()

    async def stop(self) -> None:
        """End, with the step in progress complete. Raises what a step of the loop raises."""
        self._finish()
        parts, step = self._parts, self._step
        if self._error is not None:
            raise self._error
        if step is None:
            return
        await parts.pool.wait_begun()
        if step.reply is None:
            step.reply = await parts.pool.commit(self._commit(step))
        if not step.is_applied:
            self._apply(step, step.reply, may_be_ended=True)
        await parts.hooks.wait_for_lease()
        self._send(step)

    def _commit(self, step: _Step) -> Commit:
        """The commit of the step, to be repeated."""
        ranges = TokenRanges(
            self._columns.sequence_ids, step.first_indices, step.next_indices, step.token_ids
        )
        return Commit(
            step.number,
            publications=step.publications,
            token_ranges=ranges,
            taken_references=[1] * len(step.growing),
        )
