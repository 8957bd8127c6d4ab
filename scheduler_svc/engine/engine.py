"""The engine: one queue of sequences, and the lanes that serve it."""

import asyncio
import itertools
from collections.abc import Iterable

from quire.service.errors import RequestError
from quire.service.tracing.spans import SpanExporter
from scheduler_svc.core.beams import rewind
from scheduler_svc.core.fairness import FairShares
from scheduler_svc.core.limits import Excess, PrincipalLimits, Reservation
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.queue import Arrivals, WaitingQueue
from scheduler_svc.core.quotas import Quotas
from scheduler_svc.core.request import SequenceIds
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.core.stats import EngineStats
from scheduler_svc.core.tenants import TenantsState, export_tenants
from scheduler_svc.engine.dispatcher import Dispatcher, MatchPools
from scheduler_svc.engine.model_changes import forget_model
from scheduler_svc.engine.model_geometry import ModelGeometry
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.engine.refusals import cancelled, overload_error, prompt_error, width_error
from scheduler_svc.lane.lane import Lane
from scheduler_svc.store.hashing import HashChain, root_hash
from scheduler_svc.store.requests import RequestKey
from scheduler_svc.tracing import request_phases


class Engine:
    """All live requests, from acceptance to end.

    A sequence is queued in `waiting`, then assigned to a lane, then gets a row there; its group
    stays in `live` throughout.
    """

    def __init__(
        self,
        record_writer: RecordWriter,
        match_pools: MatchPools,
        placement: Placement,
        epoch: int,
        by_priority: bool,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        spans: SpanExporter | None = None,
    ) -> None:
        self.lanes: dict[int, Lane] = {}
        # Why workers are refused, by address.
        self.refused_workers: dict[str, str] = {}
        # Set when a lane is added or removed; the listener clears it.
        self.lanes_changed = asyncio.Event()
        self.live: dict[RequestKey, Group] = {}
        self.sequence_ids = SequenceIds(epoch)
        self.shares = FairShares()
        self.quotas = Quotas()
        self.waiting = WaitingQueue(self.shares)
        self.model: ModelGeometry | None = None
        self.arrivals = Arrivals()
        self.stats = EngineStats()
        self._record_writer = record_writer
        self._by_priority = by_priority
        self._max_waiting = (max_waiting_requests, max_waiting_tokens)
        self._spans = spans
        self._order = itertools.count()
        self._last_model: ModelGeometry | None = None
        # Of all output, by its fingerprint, as Redis has it; empty if unknown.
        self.output_model = b""
        self.dispatcher = Dispatcher(
            self.waiting, self.lanes, self._prepare, self.charge_output, match_pools, placement
        )

    @property
    def num_sequences(self) -> int:
        """Sequences of live requests: those in the queue and on lanes."""
        return len(self.waiting) + sum(lane.num_sequences for lane in self.lanes.values())

    # Requests

    def prompt_error(self, num_tokens: int) -> RequestError | None:
        """The error for a prompt that can never run; None if it can, or while no worker joined."""
        if self.model is None:
            return None
        return prompt_error(num_tokens, self.model.max_model_len, self.lanes.values())

    def overload_error(self, num_requests: int, num_tokens: int) -> RequestError | None:
        """The error if the queue has no room for `num_requests` more with `num_tokens` in all."""
        return overload_error(self.waiting, num_requests, num_tokens, self._max_waiting)

    def set_tenant(self, principal: str, weight: float, limits: PrincipalLimits) -> None:
        """Set a principal's weight and limits, as its gateway has them now."""
        self.shares.of(principal).weight = weight
        self.quotas.set_limits(principal, limits)

    def quota_excess(self, new: Reservation) -> Excess | None:
        """What a request exceeds of the limits of its principal; None if it is within all."""
        return self.quotas.excess(new, self.waiting.num_tokens_of(new.principal))

    def count_output(self) -> None:
        """Count what running sequences have sampled for the rates of their principals."""
        for lane in self.lanes.values():
            self._count_output(lane.table.all_admitted())

    def _count_output(self, sequences: Iterable[Sequence]) -> None:
        counts = self.shares.count_output(sequences)
        self.quotas.count_output(counts)
        for principal, count in counts.items():
            self.stats.of(principal).num_output_tokens += count

    def charge_output(self) -> None:
        """Count output, and charge it to the shares of its principals."""
        self.count_output()
        self.shares.apply_output()

    def export_tenants(self) -> TenantsState:
        """What the next leader has to know of the tenants."""
        self.count_output()
        on_lanes = [
            sequence
            for lane in self.lanes.values()
            for sequence in (*lane.assigned, *lane.table.all_admitted())
        ]
        # Without journaled tokens they are new requests of the next leader.
        charged_again = [other for other in on_lanes if not other.num_journaled]
        return export_tenants(self.shares, self.quotas, charged_again)

    def submit(self, group: Group) -> None:
        """Queue a new request."""
        self.stats.accept(group.key.principal, group.num_prompt_tokens)
        self.adopt(group)

    def adopt(self, group: Group) -> None:
        """Queue a request that another shard has accepted."""
        group.queue_timer = self.stats.queue_times.start(group.key.principal)
        request_phases.begin_queue(group, self._spans)
        self._queue(group)

    def restore(self, group: Group) -> None:
        """Queue a request of an earlier term."""
        # That term has charged it.
        group.prompt_charge = 0.0
        self._queue(group)

    def _queue(self, group: Group) -> None:
        """Queue a request with the tokens that it already has."""
        group.order = (group.record.priority if self._by_priority else 0, next(self._order))
        group.num_live = len(group.outputs)
        self.live[group.key] = group
        request_phases.continue_trace(group, self._spans)
        self.quotas.started(group)
        for sequence in group.sequences:
            sequence.num_counted_tokens = sequence.num_served_tokens
        self.arrivals.queued()
        self._enqueue(group, group.sequences)

    def abort(self, group: Group, error: RequestError) -> None:
        """End a request with an error in any state; the next step frees its blocks."""
        group.fail(error)
        self.finish_ended(group)

    def cancel(self, group: Group) -> None:
        """End a request because its client wants that."""
        self.abort(group, cancelled())

    def withdraw(self, group: Group) -> None:
        """Forget a request that waits as a whole: another shard gets it."""
        for sequence in group.sequences:
            self.waiting.remove(sequence)
        del self.live[group.key]
        self.quotas.given(group)

    def return_withdrawn(self, group: Group, output_model: bytes) -> None:
        """Queue a request again that no other shard got. `output_model`: that of its withdrawal."""
        self.live[group.key] = group
        self.quotas.started(group)
        for sequence in group.sequences:
            if not (sequence in group.siblings or sequence.is_finished):
                self.waiting.add(sequence)
        # The workers may have changed meanwhile.
        self._forget_model([group], output_model != self.output_model)
        self.finish_ended(group)
        self.dispatcher.wake()

    def finish_ended(self, group: Group) -> None:
        """Finish the group's ended sequences: queued ones now, those on lanes in the next step."""
        for sequence in group.sequences:
            if sequence.is_ended and self.waiting.remove(sequence):
                self.sequence_finished(sequence)
        for lane in self.lanes.values():
            lane.wake()

    def sequence_finished(self, sequence: Sequence) -> None:
        """Account for an ended sequence that holds no blocks or row any more."""
        group = sequence.group
        assert not sequence.is_finished
        group.num_live -= 1
        sequence.is_finished = True
        self.shares.refund_prompt(sequence)
        self._count_output((sequence,))
        if group.error is None:
            assert sequence.end is not None
            self.stats.end(sequence.end.reason.value)
            request_phases.end_sequence(sequence)
            group.subscriber.ended(sequence, sequence.end)
        elif sequence.is_first and sequence.end is None:
            # Siblings that wait for its prompt end with it; after its end the lane finishes them.
            if group.beams is None:
                group.num_live -= len(group.siblings)
            for sibling in group.siblings:
                sibling.is_finished = True
            group.siblings = []
        if group.num_live == 0:
            self._close(group)

    def _close(self, group: Group) -> None:
        del self.live[group.key]
        self.quotas.ended(group)
        self._record_writer.enqueue(group)
        if group.error is not None:
            self.stats.end(group.error.code.name.lower())
            request_phases.fail_request(group)
            group.subscriber.failed(group, group.error)

    # Lanes

    def add(self, lane: Lane, model: ModelGeometry) -> None:
        """Add a lane. The first one sets the model, until the last one is removed."""
        assert self.model in (None, model)
        if (last := self._last_model) is not None and last != model:
            # Of another model, those that another shard has given since its change was noticed.
            self._forget_model(self.waiting.groups(), last.fingerprint != model.fingerprint)
        self.model = self._last_model = model
        self.lanes[lane.worker.incarnation] = lane
        self.lanes_changed.set()
        self.dispatcher.wake()

    def remove(self, lane: Lane) -> list[Sequence]:
        """Remove a lane; requeue its sequences with the tokens that they have, and return them."""
        incarnation = lane.worker.incarnation
        del self.lanes[incarnation]
        self.lanes_changed.set()
        lost = []
        for group in list(self.live.values()):
            theirs = [
                other
                for other in group.sequences
                if other.lane_incarnation == incarnation and not other.is_finished
            ]
            if theirs:
                lost += theirs
                request_phases.lose_worker(group, theirs, lane.address)
                self._recover(group, theirs)
        if not self.lanes:
            self.model = None
        self.dispatcher.wake()
        return lost

    def _recover(self, group: Group, lost: list[Sequence]) -> None:
        """Rewind sequences of a lost lane and queue them again."""
        # Blocks stay pinned until the step after the last sibling is forked.
        if any(other.is_first or other in group.siblings for other in lost):
            group.siblings = [other for other in group.siblings if other not in lost]
            group.pinned_blocks = None
        for sequence in lost:
            rewind(sequence)
        self.stats.num_recovered += len(lost)
        self._enqueue(group, lost)

    def _enqueue(self, group: Group, sequences: list[Sequence]) -> None:
        """Queue the sequences that have not ended. If the first has yet to compute its prompt, the
        rest are forked from it; otherwise each computes what no cache has."""
        if group.beams is not None:
            sequences = sequences[:1]
        waiting = [other for other in sequences if not other.is_ended]
        if waiting and waiting[0].is_first and not waiting[0].num_output_tokens:
            forked = [other for other in waiting[1:] if not other.num_output_tokens]
            group.siblings += forked
            waiting = [other for other in waiting if other not in forked]
        if any(not other.has_precedence for other in waiting):
            self._make_comparable(group.key.principal)
        for sequence in waiting:
            self.waiting.add(sequence)
        for sequence in sequences:
            if sequence.is_ended:
                self.sequence_finished(sequence)
        self.dispatcher.wake()

    def _make_comparable(self, principal: str) -> None:
        """Prepare the queue for the first new request of a principal beside those of others: charge
        what they were served, and take back what they hold on lanes without running there."""
        self.shares.of(principal)
        if not self.shares.has_several or self.waiting.has_new(principal):
            return
        self.charge_output()
        # A lane without rows has room for all that it holds.
        for lane in [lane for lane in self.lanes.values() if lane.rows]:
            self.requeue(lane.recall(principal))

    def change_model(self) -> None:
        """Prepare the waiting requests for another model: abort those that have output."""
        self._forget_model(self.waiting.groups(), is_other=True)

    def _forget_model(self, groups: Iterable[Group], is_other: bool) -> None:
        for group in groups:
            error = forget_model(group, is_other)
            if error is not None and group.error is None:
                self.abort(group, error)

    def requeue(self, sequences: Iterable[Sequence]) -> None:
        """Return sequences without a row to their places in the queue."""
        for sequence in sequences:
            sequence.set_lane(None)
            if sequence.is_ended:
                self.sequence_finished(sequence)
            else:
                self.waiting.add(sequence)
        self.dispatcher.wake()

    def has_other_lane(self, incarnation: int) -> bool:
        """Whether another worker's lane accepts requests."""
        return any(not lane.draining for other, lane in self.lanes.items() if other != incarnation)

    def has_waiting(self) -> bool:
        """Whether a sequence is queued."""
        return bool(self.waiting)

    def _prepare(self, sequence: Sequence) -> bool:
        """Prepare a sequence for a lane; False if it is finished: it has ended or can never run."""
        assert self.model is not None
        if sequence.chain is None:
            error = self.prompt_error(sequence.num_prompt_tokens)
            if error is not None:
                self.abort(sequence.group, error)
                return False
            root = root_hash(self.model.fingerprint)
            salt = sequence.group.record.cache_salt
            for other in sequence.group.sequences:
                other.chain = HashChain(root, self.model.block_size, salt)
                other.set_max_num_tokens(self.model.max_model_len)
            if (beams := sequence.group.beams) is not None:
                beams.limit(self.model.max_model_len - sequence.num_prompt_tokens)
        if error := width_error(sequence, self.lanes.values()):
            self.abort(sequence.group, error)
            return False
        sequence.end_if_complete()
        if sequence.end is not None:
            # It was restored with all its tokens.
            self.finish_ended(sequence.group)
            return False
        return True
