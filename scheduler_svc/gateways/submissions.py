"""New requests: checked, recorded, queued."""

import asyncio
import itertools
from collections.abc import Coroutine

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.restoring import group_of
from scheduler_svc.engine import Engine
from scheduler_svc.gateways.attachments import NO_REDIS, Attachments, id_taken
from scheduler_svc.gateways.connection import GatewayConnection
from scheduler_svc.gateways.submission import key_of, malformed, record_of
from scheduler_svc.store.errors import StoreError, StoreUnavailable
from scheduler_svc.store.requests import Recorded, RequestRecord
from scheduler_svc.store.store import Store

# New requests wait so long for a Redis that is away.
RECORD_PATIENCE_S = 10.0
RECORD_RETRY_S = 0.1

_Submission = scheduler_pb2.Submission


class Submissions:
    """A submission whose request is known, here or in its record, is attached to it."""

    def __init__(
        self, engine: Engine, store: Store, recorder: Recorder, attachments: Attachments
    ) -> None:
        self._engine = engine
        self._store = store
        self._recorder = recorder
        self._attachments = attachments
        self._tasks: set[asyncio.Task[None]] = set()
        # Unique across leaderships: a later epoch starts milliseconds, thus millions, above.
        self._sequence_ids = itertools.count(store.leadership.epoch << 22)

    def close(self) -> None:
        """Answers no submission more."""
        for task in self._tasks:
            task.cancel()

    async def submit(self, submissions: list[_Submission], connection: GatewayConnection) -> None:
        """Attaches to what is known; checks and records the rest of a frame in one go."""
        new: list[tuple[_Submission, RequestRecord]] = []
        surplus: list[tuple[_Submission, RequestError]] = []
        num_tokens = 0
        for submission in submissions:
            if group := self._engine.live.get(key_of(submission)):
                self._attachments.attach_if_same(submission, group, connection)
                continue
            num_prompt_tokens = len(submission.prompt_token_ids)
            refusal = malformed(submission) or self._engine.refusal(num_prompt_tokens)
            if refusal is not None:
                self._refuse(submission, refusal, connection)
                continue
            full = self._engine.overload(len(new) + 1, num_tokens + num_prompt_tokens)
            # Who was accepted before waits again.
            if full is None or submission.again:
                new.append((submission, self._record_of(submission)))
                num_tokens += num_prompt_tokens
            else:
                surplus.append((submission, full))
        if surplus:
            self._begin(self._turn_away(surplus, connection))
        if new:
            # Not cancelled with the stream: what is recorded is also queued, and then detached.
            await asyncio.shield(self._begin(self._record(new, connection)))

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _refuse(
        self, submission: _Submission, refusal: RequestError, connection: GatewayConnection
    ) -> None:
        self._engine.stats.num_refused += 1
        connection.reject(submission.attachment, refusal)

    async def _turn_away(
        self, surplus: list[tuple[_Submission, RequestError]], connection: GatewayConnection
    ) -> None:
        """Those that need not wait are answered: they have finished before."""
        for submission, refusal in surplus:
            if not await self._attachments.attach_finished(submission, connection):
                self._refuse(submission, refusal, connection)

    def _record_of(self, submission: _Submission) -> RequestRecord:
        record = record_of(submission, next(self._sequence_ids))
        for _ in range(record.num_choices - 1):
            next(self._sequence_ids)
        return record

    async def _record(
        self, new: list[tuple[_Submission, RequestRecord]], connection: GatewayConnection
    ) -> None:
        with self._engine.arrivals.coming(len(new)):
            try:
                answers = await self._stored(new)
            except StoreError:
                self._recorder.unanswered(record for _, record in new)
                for submission, _ in new:
                    connection.reject(submission.attachment, NO_REDIS)
                return
            for (submission, record), recorded in zip(new, answers, strict=True):
                if recorded is Recorded.NEW:
                    group = group_of(record)
                    self._engine.submit(group)
                    self._attachments.attach(group, connection, submission)
                elif recorded is Recorded.KNOWN:
                    await self._attachments.attach_known(submission, connection)
                else:
                    connection.reject(submission.attachment, id_taken(submission.request_id))

    async def _stored(self, new: list[tuple[_Submission, RequestRecord]]) -> list[Recorded]:
        """Writes the records; waits for a Redis that is away, but not for ever."""
        again = [submission.again for submission, _ in new]
        keys = {record.key for _, record in new}
        deadline = asyncio.get_running_loop().time() + RECORD_PATIENCE_S
        while True:
            try:
                # An id may be asked for again as soon as its client has seen the end.
                await self._recorder.settle(keys)
                return await self._store.record([record for _, record in new], again)
            except StoreUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RECORD_RETRY_S)
