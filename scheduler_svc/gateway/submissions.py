"""New requests: validates, records and queues them."""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass

import structlog
from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, failed
from scheduler_svc.core.limits import COUNTS, Excess, Reservation
from scheduler_svc.engine.claims import Claims
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.moves import Moves
from scheduler_svc.engine.record_conversion import group_of
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.engine.tenant_exchange import TenantExchange
from scheduler_svc.gateway.attachments import NO_REDIS, Attachments, id_taken, key_of
from scheduler_svc.gateway.connection import GatewayConnection
from scheduler_svc.gateway.pending import PendingRequests
from scheduler_svc.gateway.submission_conversion import limits_of, record_of, reservation_of
from scheduler_svc.gateway.validation import num_choices, validation_error
from scheduler_svc.store.errors import StoreError, StoreUnavailable
from scheduler_svc.store.requests import RecordOutcome, RequestRecord
from scheduler_svc.store.store import Store

log = structlog.get_logger()

# How long new requests wait while Redis is unavailable.
RECORD_TIMEOUT_S = 10.0
RECORD_RETRY_S = 0.1
# How long the next frames of a gateway wait for the records of new requests: a part of Redis that
# does not respond delays the requests that need it, and no others.
_IN_ORDER_S = 0.25
# How long other shards are waited for at most before a request beyond a share is tried again. They
# learn within a heartbeat that it needs what they do not use any more. The last attempt is for
# shards that have asked for the same at once.
_WAITS_FOR_ROOM_S = (0.0, 1.0, 1.0)

_Submission = scheduler_pb2.Submission


class Submissions:
    """Accepts new requests; a submission of a live request is attached to it."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        record_writer: RecordWriter,
        attachments: Attachments,
        claims: Claims,
        moves: Moves,
        tenants: TenantExchange,
    ) -> None:
        self._claims = claims
        self._engine = engine
        self._store = store
        self._record_writer = record_writer
        self._attachments = attachments
        self.pending = PendingRequests(engine)
        self._moves = moves
        self._tenants = tenants
        self._tasks: set[asyncio.Task[None]] = set()
        # Recordings that no frame waits for any more.
        self._num_slow = 0

    def close(self) -> None:
        """Cancel the submissions in progress."""
        for task in self._tasks:
            task.cancel()

    async def submit(self, submissions: list[_Submission], connection: GatewayConnection) -> None:
        """Attach a frame's submissions to live requests; validate and record the new ones."""
        if any(submission.again for submission in submissions):
            # With their output, which would be computed again otherwise.
            with contextlib.suppress(StoreUnavailable):
                await self._moves.take()
        if waiting := await self._submit(submissions, connection, attempt=0):
            for submission in waiting:
                connection.begin_wait(submission.attachment)
            self._start(self._submit_with_room(waiting, connection))

    async def _submit(
        self, submissions: list[_Submission], connection: GatewayConnection, attempt: int
    ) -> list[_Submission]:
        """Submit, and return the requests that other shards may soon leave room for."""
        new: list[_NewRequest] = []
        surplus: list[tuple[_Submission, RequestError]] = []
        waiting: list[_Submission] = []
        num_tokens = 0
        for submission in submissions:
            if submission.HasField("tenant"):
                self._set_tenant(submission.principal, submission.tenant)
            if group := self._engine.live.get(key_of(submission)):
                self._attachments.attach_if_same(submission, group, connection)
                continue
            num_prompt_tokens = len(submission.prompt_token_ids)
            error = validation_error(submission) or self._engine.prompt_error(num_prompt_tokens)
            if error is not None:
                self._refuse(submission, error, connection)
                continue
            # `again`: it was accepted before, so it is queued whatever the limits.
            reservation = None if submission.again else reservation_of(submission)
            if reservation is not None:
                full = self._engine.overload_error(len(new) + 1, num_tokens + num_prompt_tokens)
                if full is None and (excess := self._engine.quota_excess(reservation)):
                    full = self._refusal(reservation, excess, attempt)
                    if full is None:
                        waiting.append(submission)
                        if attempt == 0:
                            self.pending.begin(key_of(submission))
                        continue
                if full is not None:
                    surplus.append((submission, full))
                    continue
                self._engine.quotas.reserve(reservation)
            new.append(_NewRequest(submission, self._record_of(submission), reservation))
            self.pending.begin(key_of(submission))
            num_tokens += num_prompt_tokens
        if surplus:
            self._start(self._refuse_surplus(surplus, connection))
        if new:
            # Not cancelled with the stream: what is recorded must also be queued.
            recording = self._start(self._record(new, connection))
            keys = [request.record.key for request in new]
            recording.add_done_callback(lambda _: self.pending.end(keys))
            # Only the first attempt delays frames: later ones have a task of their own.
            if attempt > 0 or await self._is_recorded_soon(recording):
                await asyncio.shield(recording)
            else:
                for request in new:
                    connection.begin_wait(request.submission.attachment)
                self._start(self._end_waits(recording, new, connection))
        return waiting

    async def _is_recorded_soon(self, recording: asyncio.Task[None]) -> bool:
        """Wait for it for a short time; not at all while others take longer."""
        await asyncio.wait({recording}, timeout=0.0 if self._num_slow else _IN_ORDER_S)
        return recording.done()

    async def _end_waits(
        self,
        recording: asyncio.Task[None],
        new: list["_NewRequest"],
        connection: GatewayConnection,
    ) -> None:
        """Apply what the gateway sends about requests until they are recorded. An error ends the
        gateway's stream, as one that is raised while a frame is applied."""
        self._num_slow += 1
        try:
            await asyncio.shield(recording)
        except Exception:
            log.exception("requests were not recorded")
            connection.close(failed(StatusCode.INTERNAL, "INTERNAL", "the frame failed"))
        finally:
            self._num_slow -= 1
        for request in new:
            self._end_wait(request.submission.attachment, connection)

    def _refusal(self, new: Reservation, excess: Excess, attempt: int) -> RequestError | None:
        """The error of a request beyond a share, with the shard that has room for it. None if this
        shard may get more: at once, of what no shard uses, or a little later, of what has just been
        used."""
        other = None
        if excess.is_divided:
            if attempt > 0:
                other = self._engine.quotas.other_with_room(new.principal, excess)
            may_get_more = attempt < len(_WAITS_FOR_ROOM_S) and excess.name in COUNTS
            if attempt == 0 or (other is None and may_get_more):
                return None
        return excess.error(other)

    async def _submit_with_room(
        self, waiting: list[_Submission], connection: GatewayConnection
    ) -> None:
        """Submit requests again after the shares of their limits were exchanged."""
        for attempt, within_s in enumerate(_WAITS_FOR_ROOM_S, 1):
            with self._engine.quotas.wanting([reservation_of(one) for one in waiting]):
                has_asked = await self._tenants.ask(within_s)
            # Those whose clients have disconnected meanwhile are dropped.
            wanted = [
                one
                for one in waiting
                if connection.is_wanted(one.attachment)
                and not self.pending.refuse_cancelled(one, connection)
            ]
            ended = {one.attachment: key_of(one) for one in waiting}
            waiting = []
            if has_asked:
                waiting = await self._submit(wanted, connection, attempt)
            else:
                for submission in wanted:
                    connection.reject(submission.attachment, NO_REDIS)
            for attachment in ended.keys() - {one.attachment for one in waiting}:
                self._end_wait(attachment, connection)
                self.pending.end([ended[attachment]])
            if not waiting:
                return

    def _end_wait(self, attachment: int, connection: GatewayConnection) -> None:
        """Apply what the gateway has sent about a request while it was not accepted."""
        for sent in connection.end_wait(attachment):
            group = connection.attached.get(attachment)
            if group is None:
                return
            if isinstance(sent, scheduler_pb2.Finish):
                self._attachments.finish(group, sent)
            elif isinstance(sent, scheduler_pb2.Detachment):
                self._attachments.detach(group, connection, sent.client_gone)
            else:
                self._engine.cancel(group)

    def _set_tenant(self, principal: str, policy: scheduler_pb2.TenantPolicy) -> None:
        weight = policy.weight if policy.weight > 0 else 1.0
        self._engine.set_tenant(principal, weight, limits_of(policy))
        self._engine.stats.queue_times.set_class(principal, policy.tenant_class)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _refuse(
        self, submission: _Submission, error: RequestError, connection: GatewayConnection
    ) -> None:
        self._engine.stats.refuse(submission.principal, error.info.reason or error.code.name)
        connection.reject(submission.attachment, error)

    async def _refuse_surplus(
        self, surplus: list[tuple[_Submission, RequestError]], connection: GatewayConnection
    ) -> None:
        """Refuse what exceeds the queue, except requests that have finished already."""
        for submission, error in surplus:
            if not await self._attachments.attach_finished(submission, connection):
                self._refuse(submission, error, connection)

    def _record_of(self, submission: _Submission) -> RequestRecord:
        return record_of(submission, self._engine.sequence_ids.take(num_choices(submission)))

    async def _record(self, new: list["_NewRequest"], connection: GatewayConnection) -> None:
        with self._engine.arrivals.pending(len(new)), self._claims.recording():
            try:
                new = await self._claim(new, connection)
                outcomes = await self._store_records(new) if new else []
            except StoreError:
                self._record_writer.discard(request.record for request in new)
                for request in new:
                    self._end_reservation(request, is_accepted=False)
                    self.pending.reject(request.submission, NO_REDIS, connection)
                return
            for request, recorded in zip(new, outcomes, strict=True):
                submission = request.submission
                self._end_reservation(request, recorded is RecordOutcome.NEW)
                if recorded is RecordOutcome.NEW:
                    group = group_of(request.record)
                    self._engine.submit(group)
                    self._attachments.attach(group, connection, submission)
                elif recorded is RecordOutcome.EXISTS:
                    await self._attachments.attach_known(submission, connection)
                else:
                    connection.reject(submission.attachment, id_taken(submission.request_id))
                self.pending.accepted(request.record.key)

    async def _claim(
        self, new: list["_NewRequest"], connection: GatewayConnection
    ) -> list["_NewRequest"]:
        """Claim the ids that clients chose; return the requests that are this shard's. Gateways
        send the others to the shards that have their ids."""
        chosen = [request for request in new if request.submission.has_client_id]
        if not (chosen and self._claims.is_needed):
            return new
        shards = await self._claims.claim([request.record.key for request in chosen])
        elsewhere = {
            request.record.key: shard
            for request, shard in zip(chosen, shards, strict=True)
            if shard != self._claims.shard
        }
        for request in new:
            if request.record.key in elsewhere:
                self._end_reservation(request, is_accepted=False)
                error = other_shard(elsewhere[request.record.key])
                self.pending.reject(request.submission, error, connection)
        return [request for request in new if request.record.key not in elsewhere]

    def _end_reservation(self, request: "_NewRequest", is_accepted: bool) -> None:
        """End a reservation; the engine counts accepted requests as live."""
        if request.reservation is None:
            return
        if is_accepted:
            self._engine.quotas.confirm(request.reservation)
        else:
            self._engine.quotas.cancel(request.reservation)

    async def _store_records(self, new: list["_NewRequest"]) -> list[RecordOutcome]:
        """Write the records; retry for `RECORD_TIMEOUT_S` while Redis is unavailable."""
        are_resubmissions = [request.submission.again for request in new]
        records = [request.record for request in new]
        keys = {record.key for record in records}
        deadline = asyncio.get_running_loop().time() + RECORD_TIMEOUT_S
        while True:
            try:
                # A client may reuse an id as soon as it has received the end.
                await self._record_writer.sync(keys)
                return await self._store.record(records, are_resubmissions)
            except StoreUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RECORD_RETRY_S)


@dataclass(frozen=True, slots=True)
class _NewRequest:
    """A submission that is being recorded."""

    submission: _Submission
    record: RequestRecord
    # None if it was accepted before.
    reservation: Reservation | None


def other_shard(shard: int) -> RequestError:
    """The error with which a gateway sends a request to another shard."""
    return failed(
        StatusCode.ABORTED,
        "OTHER_SHARD",
        f"shard {shard} has the request",
        metadata={"shard": str(shard)},
    )
