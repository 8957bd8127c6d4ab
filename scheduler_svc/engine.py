"""The engine: one queue of requests, and the lanes that take from its head."""

import asyncio
from collections import deque
from dataclasses import dataclass

import structlog

from quire.service.errors import RequestError, invalid, unavailable
from scheduler_svc.core.placement import choose_lane
from scheduler_svc.core.recorder import Recorder, key_of
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes.lane import Lane
from scheduler_svc.store.hashing import HashChain, extra_keys, root_hash
from scheduler_svc.store.requests import RequestKey
from scheduler_svc.store.types import PrefixMatch

log = structlog.get_logger()

# Requests at the head of the queue that are matched with the caches in one go.
PLACEMENT_BATCH = 64


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What all workers must agree on."""

    fingerprint: bytes
    block_size: int
    max_model_len: int
    kv_cache_dtype: str


class Engine:
    """Live requests, from their acceptance to their end.

    A request waits in `waiting`, then on a lane, then has a row there; `live` holds it all along.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.lanes: dict[int, Lane] = {}
        self.live: dict[RequestKey, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.model: ServedModel | None = None
        self._recorder = recorder
        self._dispatch = asyncio.Event()
        self._idle = asyncio.Event()

    # Requests

    def refusal(self, sequence: Sequence) -> RequestError | None:
        """Why a request can never run; None if it can, or if no worker has said yet."""
        if self.model is None or sequence.num_prompt_tokens < self.model.max_model_len:
            return None
        return invalid(
            "prompt",
            "PROMPT_TOO_LONG",
            f"has {sequence.num_prompt_tokens} tokens; with one token of output the model takes "
            f"at most {self.model.max_model_len - 1}",
        )

    def submit(self, sequence: Sequence) -> None:
        self.live[key_of(sequence)] = sequence
        self._idle.clear()
        self.waiting.append(sequence)
        self._dispatch.set()

    def end(self, sequence: Sequence, error: RequestError) -> None:
        """Ends a request from outside, wherever it is; its blocks are free in the next step."""
        sequence.fail(error)
        self.stir(sequence)

    def end_all(self, error: RequestError) -> None:
        for sequence in list(self.live.values()):
            self.end(sequence, error)

    async def until_idle(self) -> None:
        """Returns when no request is live."""
        if self.live:
            await self._idle.wait()

    def stir(self, sequence: Sequence) -> None:
        """Has whoever holds a leaving request let go of it."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.left(sequence)
        else:
            for lane in self.lanes.values():
                lane.wake()

    def left(self, sequence: Sequence) -> None:
        """A request is over: it holds nothing any more."""
        del self.live[key_of(sequence)]
        if not self.live:
            self._idle.set()
        self._recorder.left(sequence)
        if sequence.end is not None:
            sequence.subscriber.ended(sequence, sequence.end)
        elif sequence.error is not None:
            sequence.subscriber.failed(sequence, sequence.error)

    # Lanes

    def add(self, lane: Lane, model: ServedModel) -> None:
        """A lane more. The first one sets the model, until the last one is gone."""
        assert self.model in (None, model)
        self.model = model
        self.lanes[lane.worker.incarnation] = lane
        self._dispatch.set()

    def remove(self, lane: Lane, why: str) -> None:
        """A lane is gone: those that wait on it go back to the queue, those that ran end."""
        del self.lanes[lane.worker.incarnation]
        self.give_back(lane.assigned)
        for sequence in list(lane.rows):
            sequence.lose(unavailable("WORKER_LOST", f"the worker was lost: {why}"))
            self.left(sequence)
        if not self.lanes:
            self._forget_model()
        self._dispatch.set()

    def _forget_model(self) -> None:
        """Workers of another model may come; what waits is prepared for theirs."""
        self.model = None
        for sequence in self.waiting:
            sequence.chain = None

    def give_back(self, sequences: list[Sequence]) -> None:
        """Takes requests that never got a row back to the head of the queue."""
        for sequence in reversed(sequences):
            if sequence.leaving:
                self.left(sequence)
            else:
                self.waiting.appendleft(sequence)
        self._dispatch.set()

    def room(self) -> None:
        """Some lane may take more now."""
        self._dispatch.set()

    # Dispatch

    async def run(self) -> None:
        """Moves requests from the queue to lanes as they get room."""
        while True:
            await self._dispatch.wait()
            self._dispatch.clear()
            while self.model is not None and await self._place(self.model):
                pass

    async def _place(self, model: ServedModel) -> bool:
        """Places requests from the head of the queue; True if there may be more to place."""
        lanes = [lane for lane in self.lanes.values() if not lane.draining]
        batch = [self.waiting[i] for i in range(min(len(self.waiting), PLACEMENT_BATCH))]
        if not lanes or not batch:
            return False
        for sequence in batch:
            self._prepare(sequence, model)
        matches = await self._match(lanes, batch)
        if any(self.lanes.get(lane.worker.incarnation) is not lane for lane in lanes):
            # A lane has gone meanwhile: nobody would step what it is given.
            return True
        for sequence, row in zip(batch, matches, strict=True):
            # The queue may have changed while the caches were asked.
            if not self.waiting or self.waiting[0] is not sequence:
                return True
            if not self._assign_head(lanes, row):
                return False
        return bool(self.waiting)

    def _assign_head(self, lanes: list[Lane], matches: list[PrefixMatch]) -> bool:
        sequence = self.waiting[0]
        refusal = self.refusal(sequence)
        if refusal is not None:
            self.end(sequence, refusal)
            return True
        loads = [lane.load(sequence, match) for lane, match in zip(lanes, matches, strict=True)]
        chosen = choose_lane(loads)
        if chosen is None:
            return False
        lanes[chosen].assign(self.waiting.popleft())
        return True

    async def _match(self, lanes: list[Lane], batch: list[Sequence]) -> list[list[PrefixMatch]]:
        """Per sequence, what each lane's cache holds of it."""
        if len(lanes) == 1:
            # The choice is made; the lane asks its cache when it considers the request.
            return [[PrefixMatch(0, 0)]] * len(batch)
        columns = await asyncio.gather(*(lane.match(batch) for lane in lanes))
        return [list(row) for row in zip(*columns, strict=True)]

    def _prepare(self, sequence: Sequence, model: ServedModel) -> None:
        if sequence.chain is None:
            root = root_hash(model.fingerprint)
            extra = extra_keys(sequence.cache_salt)
            sequence.chain = HashChain(root, model.block_size, extra)
            sequence.limit(model.max_model_len)
