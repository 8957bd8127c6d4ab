"""The engine: one queue of sequences, and the lanes that take from its head."""

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from grpc import StatusCode

from quire.service.errors import RequestError, failed, invalid, unavailable
from scheduler_svc.core.arrivals import Arrivals
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.policy import blocks_for, fit_of_prompt
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.core.stats import EngineStats
from scheduler_svc.core.view import Fit
from scheduler_svc.dispatch import Dispatcher, MatchPools
from scheduler_svc.lanes.lane import Lane
from scheduler_svc.store.hashing import HashChain, extra_keys, root_hash
from scheduler_svc.store.requests import RequestKey

RETRY_WHEN_FULL_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What all workers must agree on."""

    fingerprint: bytes
    block_size: int
    max_model_len: int
    kv_cache_dtype: str


class Engine:
    """Live requests, from their acceptance to their end.

    A sequence waits in `waiting`, then on a lane, then has a row there; `live` holds its group
    all along.
    """

    def __init__(
        self,
        recorder: Recorder,
        match_pools: MatchPools,
        placement: Placement,
        by_priority: bool,
        max_waiting_requests: int,
        max_waiting_tokens: int,
    ) -> None:
        self.lanes: dict[int, Lane] = {}
        # A lane has come or gone; cleared by whoever tells of it.
        self.lanes_changed = asyncio.Event()
        self.live: dict[RequestKey, Group] = {}
        self.waiting = WaitingQueue()
        self.model: ServedModel | None = None
        self.arrivals = Arrivals()
        self.stats = EngineStats()
        self._recorder = recorder
        self._by_priority = by_priority
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._order = itertools.count()
        self._last_model: ServedModel | None = None
        self._dispatcher = Dispatcher(
            self.waiting, self.lanes, self._prepare, match_pools, placement
        )

    async def run(self) -> None:
        """Hands sequences to lanes, for ever."""
        await self._dispatcher.run()

    # Requests

    def refusal(self, num_tokens: int) -> RequestError | None:
        """Why a prompt of so many tokens can never run; None if it can, or if no worker has said
        yet."""
        if self.model is None:
            return None
        if num_tokens >= self.model.max_model_len:
            return invalid(
                "prompt",
                "PROMPT_TOO_LONG",
                f"has {num_tokens} tokens; with one token of output the model takes "
                f"at most {self.model.max_model_len - 1}",
            )
        lane = max(self.lanes.values(), key=lambda lane: lane.num_admissible_blocks)
        num_usable_blocks = lane.worker.num_blocks - 1
        if fit_of_prompt(num_tokens, lane.limits, num_usable_blocks) is Fit.NEVER:
            return invalid(
                "prompt",
                "PROMPT_TOO_LONG",
                f"needs {blocks_for(num_tokens, lane.limits.block_size)} blocks of the cache; "
                f"the largest one has {lane.num_admissible_blocks} for new requests",
            )
        return None

    def overload(self, num_requests: int, num_tokens: int) -> RequestError | None:
        """Why no request more may wait; counts those that are about to be submitted, too."""
        waiting = self.waiting
        if len(waiting) + num_requests > self._max_waiting_requests:
            return _full(f"{len(waiting)} requests wait, at most {self._max_waiting_requests} may")
        if waiting and waiting.num_tokens + num_tokens > self._max_waiting_tokens:
            return _full(
                f"{waiting.num_tokens} tokens wait, at most {self._max_waiting_tokens} may"
            )
        return None

    def submit(self, group: Group) -> None:
        """Queues a new request."""
        self.stats.num_accepted += 1
        self.restore(group)

    def await_lanes(self, incarnations: Iterable[int], within_s: float) -> None:
        """Lets requests wait, but not for long, until these workers have lanes."""
        self._dispatcher.await_lanes(incarnations, within_s)

    def restore(self, group: Group) -> None:
        """Takes up a request, new or with the tokens that it has already."""
        group.order = (group.priority if self._by_priority else 0, next(self._order))
        group.num_live = len(group.sequences)
        self.live[group.key] = group
        self.arrivals.queued()
        self._requeue(group, group.sequences)

    def end(self, group: Group, error: RequestError) -> None:
        """Ends a request from outside, wherever it is; its blocks are free in the next step."""
        group.fail(error)
        self.stir(group)

    def end_all(self, error: RequestError) -> None:
        for group in list(self.live.values()):
            self.end(group, error)

    def stir(self, group: Group) -> None:
        """Has whoever holds sequences of the group that are over let go of them."""
        for sequence in group.sequences:
            if sequence.is_over and self.waiting.remove(sequence):
                self.left(sequence)
        for lane in self.lanes.values():
            lane.wake()

    def left(self, sequence: Sequence) -> None:
        """A sequence is over: it holds nothing any more."""
        group = sequence.group
        assert not sequence.has_left
        group.num_live -= 1
        sequence.has_left = True
        if group.error is None:
            assert sequence.end is not None
            self.stats.end(sequence.end.reason.value)
            group.subscriber.ended(sequence, sequence.end)
        elif sequence.is_first and sequence.end is None:
            # Those that wait for its prompt go with it; behind its end they are the lane's.
            group.num_live -= len(group.siblings)
            for sibling in group.siblings:
                sibling.has_left = True
            group.siblings = []
        if group.num_live == 0:
            self._close(group)

    def _close(self, group: Group) -> None:
        del self.live[group.key]
        self._recorder.left(group)
        if group.error is not None:
            self.stats.end(group.error.code.name.lower())
            group.subscriber.failed(group, group.error)

    # Lanes

    def add(self, lane: Lane, model: ServedModel) -> None:
        """A lane more. The first one sets the model, until the last one is gone."""
        assert self.model in (None, model)
        if self._last_model not in (None, model):
            self._start_anew()
        self.model = self._last_model = model
        self.lanes[lane.worker.incarnation] = lane
        self.lanes_changed.set()
        self._dispatcher.stir()

    def remove(self, lane: Lane) -> list[Sequence]:
        """A lane is gone: what was on it goes back to the queue with the tokens that it has, and
        is returned."""
        incarnation = lane.worker.incarnation
        del self.lanes[incarnation]
        self.lanes_changed.set()
        lost = []
        for group in list(self.live.values()):
            theirs = [
                other
                for other in group.sequences
                if other.lane == incarnation and not other.has_left
            ]
            if theirs:
                lost += theirs
                self._recover(group, theirs)
        if not self.lanes:
            self.model = None
        self._dispatcher.stir()
        return lost

    def _recover(self, group: Group, lost: list[Sequence]) -> None:
        """Has sequences go on elsewhere."""
        if any(other in group.siblings for other in lost):
            group.siblings = [other for other in group.siblings if other not in lost]
            group.hold = None
        for sequence in lost:
            sequence.rewind()
        self.stats.num_recovered += len(lost)
        self._requeue(group, lost)

    def _requeue(self, group: Group, sequences: list[Sequence]) -> None:
        """Queues those that are not over. Where the first has its prompt still to compute, the
        others are forked from it then; else each computes what the caches have not."""
        waiting = [other for other in sequences if not other.is_over]
        if waiting and waiting[0].is_first and not waiting[0].num_output_tokens:
            forked = [other for other in waiting[1:] if not other.num_output_tokens]
            group.siblings += forked
            waiting = [other for other in waiting if other not in forked]
        for sequence in waiting:
            self.waiting.add(sequence)
        for sequence in sequences:
            if sequence.is_over:
                self.left(sequence)
        self._dispatcher.stir()

    def _start_anew(self) -> None:
        """Other workers serve another model: what waits is prepared for theirs."""
        for sequence in list(self.waiting):
            sequence.chain = None
            if sequence.num_output_tokens:
                self.end(sequence.group, unavailable("MODEL_CHANGED", "another model is served"))

    def give_back(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences without a row back to their places in the queue."""
        for sequence in sequences:
            sequence.place_on(None)
            if sequence.is_over:
                self.left(sequence)
            else:
                self.waiting.add(sequence)
        self._dispatcher.stir()

    def others_open(self, incarnation: int) -> bool:
        """Another worker's lane takes requests."""
        return any(not lane.draining for other, lane in self.lanes.items() if other != incarnation)

    def somebody_waits(self) -> bool:
        """Somebody is in the queue."""
        return bool(self.waiting)

    def room(self) -> None:
        """Some lane may take more now."""
        self._dispatcher.stir()

    def _prepare(self, sequence: Sequence) -> bool:
        """Readies a sequence for its lane; False if it can never run and has left."""
        assert self.model is not None
        if sequence.chain is None:
            refusal = self.refusal(sequence.num_prompt_tokens)
            if refusal is not None:
                self.end(sequence.group, refusal)
                return False
            root = root_hash(self.model.fingerprint)
            extra = extra_keys(sequence.group.cache_salt)
            for other in sequence.group.sequences:
                other.chain = HashChain(root, self.model.block_size, extra)
                other.limit(self.model.max_model_len)
        sequence.end_if_complete()
        if sequence.end is not None:
            # A restored one, which had all its tokens.
            self.stir(sequence.group)
            return False
        return True


def _full(message: str) -> RequestError:
    return failed(StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", message, RETRY_WHEN_FULL_S)
