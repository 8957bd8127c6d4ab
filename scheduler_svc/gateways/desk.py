"""What gateways ask for, done: their frames turned into calls of the engine."""

import asyncio
import itertools

import structlog
from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, failed, unavailable
from quire.service.protocol import PROTOCOL_VERSION
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.restoring import error_of, group_of, restored
from scheduler_svc.core.sequence import End, EndReason, Group
from scheduler_svc.engine import Engine
from scheduler_svc.gateways.connection import LEAD_ENDS, GatewayConnection
from scheduler_svc.gateways.orphans import Orphans
from scheduler_svc.gateways.submission import key_of, malformed, record_of
from scheduler_svc.store.errors import LeadLost, StaleEpoch, StoreUnavailable
from scheduler_svc.store.requests import Recorded, RequestKey, RequestRecord, StoredRequest
from scheduler_svc.store.store import Store
from scheduler_svc.tenure import Tenure

log = structlog.get_logger()

# New requests wait so long for a Redis that is away.
RECORD_PATIENCE_S = 10.0
RECORD_RETRY_S = 0.1

_CANCELLED = failed(StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")
_NO_REDIS = unavailable("REDIS_AWAY", "the scheduler has lost Redis or the lead")
_UNKNOWN = failed(
    StatusCode.NOT_FOUND,
    "UNKNOWN_REQUEST",
    "no such request is known, or not any more",
    metadata={"resumable": "false"},
)
_TAKEN_OVER = failed(
    StatusCode.ABORTED,
    "TAKEN_OVER",
    "another stream has taken the request over",
    metadata={"resumable": "true"},
)

_Submission = scheduler_pb2.Submission


class Desk:
    """Applies frames to the engine under one leadership; knows every open connection.

    A submission whose request is known, here or in its record, is attached to it.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        recorder: Recorder,
        tenure: Tenure,
        orphan_grace_s: float,
    ) -> None:
        self._engine = engine
        self._store = store
        self._recorder = recorder
        self._tenure = tenure
        self._orphans = Orphans(orphan_grace_s, self._cancel)
        self._connections: set[GatewayConnection] = set()
        self._submitting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._hello = self._hello_now()
        # Unique across leaderships: a later epoch starts milliseconds, thus millions, above.
        self._sequence_ids = itertools.count(store.leadership.epoch << 22)
        # Restored requests are nobody's until their gateways have found us.
        for group in engine.live.values():
            self._orphans.add(group, client_gone=False)

    # Connections

    def connect(self) -> GatewayConnection:
        """RequestError when this leadership is over."""
        if self._is_closed:
            raise LEAD_ENDS
        connection = GatewayConnection(self._store.leadership.epoch, self._tenure.held)
        connection.say_hello(self._hello)
        self._connections.add(connection)
        return connection

    def disconnect(self, connection: GatewayConnection) -> None:
        """Detaches the requests of a gateway that is gone, those being recorded included. When this
        leadership is over they are not its own any more."""
        if self._is_closed:
            return
        self._connections.discard(connection)
        for group in list(connection.attached.values()):
            self._detach(group, connection, client_gone=False)

    def announce(self) -> None:
        """Tells every gateway where readiness or the model has changed."""
        hello = self._hello_now()
        if hello != self._hello:
            self._hello = hello
            for connection in self._connections:
                connection.say_hello(hello)

    def close(self) -> None:
        """Ends every stream behind what has been said: gateways are to look for the next leader,
        with what they have not had an answer to."""
        self._is_closed = True
        self._orphans.close()
        for task in self._submitting:
            task.cancel()
        for connection in self._connections:
            # Its requests may be another leadership's by the time that the gateway has gone.
            connection.attached.clear()
            connection.close(LEAD_ENDS)
        self._connections.clear()

    def _hello_now(self) -> scheduler_pb2.SchedulerHello:
        model = self._engine.model
        return scheduler_pb2.SchedulerHello(
            protocol_version=PROTOCOL_VERSION,
            holder=self._store.leadership.holder,
            ready=bool(self._engine.lanes),
            max_model_len=model.max_model_len if model else None,
        )

    # Frames

    async def apply(
        self, frame: scheduler_pb2.ConnectRequest, connection: GatewayConnection
    ) -> None:
        """Applies one frame. RequestError if the gateway is to be turned away."""
        _check_version(frame)
        if self._is_closed:
            return
        if frame.submissions:
            await self._submit(list(frame.submissions), connection)
        for attachment in frame.attachments:
            await self._attach_known(attachment, connection)
        for finish in frame.finishes:
            if group := connection.attached.get(finish.attachment):
                _finish(group, finish)
                self._engine.stir(group)
        for detachment in frame.detachments:
            if group := connection.attached.get(detachment.attachment):
                self._detach(group, connection, detachment.client_gone)
        for cancellation in frame.cancellations:
            found = self._cancel(self._target(cancellation, connection))
            if cancellation.HasField("tag"):
                connection.answer_cancellation(cancellation.tag, found)

    # Submissions

    async def _submit(self, submissions: list[_Submission], connection: GatewayConnection) -> None:
        """Attaches to what is known; checks and records the rest of a frame in one go."""
        new: list[tuple[_Submission, RequestRecord]] = []
        num_tokens = 0
        for submission in submissions:
            if group := self._engine.live.get(key_of(submission)):
                self._attach_if_same(submission, group, connection)
                continue
            num_prompt_tokens = len(submission.prompt_token_ids)
            refusal = self._refusal(submission, len(new) + 1, num_tokens + num_prompt_tokens)
            if refusal is None:
                new.append((submission, self._record_of(submission)))
                num_tokens += num_prompt_tokens
            else:
                self._engine.stats.num_refused += 1
                connection.reject(submission.attachment, refusal)
        if new:
            # Not cancelled with the stream: what is recorded is also queued, and then detached.
            task = asyncio.create_task(self._record(new, connection))
            self._submitting.add(task)
            task.add_done_callback(self._submitting.discard)
            await asyncio.shield(task)

    def _refusal(
        self, submission: _Submission, num_requests: int, num_tokens: int
    ) -> RequestError | None:
        refusal = malformed(submission)
        refusal = refusal or self._engine.refusal(len(submission.prompt_token_ids))
        # Who was accepted before waits again.
        if refusal is None and not submission.again:
            refusal = self._engine.overload(num_requests, num_tokens)
        return refusal

    def _record_of(self, submission: _Submission) -> RequestRecord:
        record = record_of(submission, next(self._sequence_ids))
        for _ in range(record.num_choices - 1):
            next(self._sequence_ids)
        return record

    async def _record(
        self, new: list[tuple[_Submission, RequestRecord]], connection: GatewayConnection
    ) -> None:
        try:
            answers = await self._stored(new)
        except (StoreUnavailable, StaleEpoch, LeadLost):
            self._recorder.unanswered(record for _, record in new)
            for submission, _ in new:
                connection.reject(submission.attachment, _NO_REDIS)
            return
        for (submission, record), recorded in zip(new, answers, strict=True):
            if recorded is Recorded.NEW:
                group = group_of(record)
                self._engine.submit(group)
                self._attach(group, connection, submission)
            elif recorded is Recorded.KNOWN:
                await self._attach_known(submission, connection)
            else:
                connection.reject(submission.attachment, _taken(submission.request_id))
        if connection not in self._connections:
            self.disconnect(connection)

    async def _stored(self, new: list[tuple[_Submission, RequestRecord]]) -> list[Recorded]:
        """Writes the records; waits for a Redis that is away, but not for ever."""
        again = [submission.again for submission, _ in new]
        deadline = asyncio.get_running_loop().time() + RECORD_PATIENCE_S
        while True:
            try:
                # An id may be asked for again as soon as its client has seen the end.
                await self._recorder.flush()
                return await self._store.record([record for _, record in new], again)
            except StoreUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RECORD_RETRY_S)

    # Attachments

    async def _attach_known(
        self, wanted: _Submission | scheduler_pb2.Attachment, connection: GatewayConnection
    ) -> None:
        """Attaches to a request that runs; one that has ended is said again from its record."""
        key = key_of(wanted)
        try:
            await self._recorder.flush()
            stored = None if key in self._engine.live else await self._store.load(key)
        except (StoreUnavailable, StaleEpoch, LeadLost):
            connection.reject(wanted.attachment, _NO_REDIS)
            return
        # Looked for after the waiting, in which it may have come.
        if group := self._engine.live.get(key):
            self._attach(group, connection, wanted)
        elif stored is None:
            connection.reject(wanted.attachment, _UNKNOWN)
        else:
            _say_again(stored, wanted, connection)

    def _attach_if_same(
        self, submission: _Submission, group: Group, connection: GatewayConnection
    ) -> None:
        if submission.digest == group.terms.digest:
            self._attach(group, connection, submission)
        else:
            connection.reject(submission.attachment, _taken(submission.request_id))

    def _attach(
        self,
        group: Group,
        connection: GatewayConnection,
        wanted: _Submission | scheduler_pb2.Attachment,
    ) -> None:
        """The newest attachment has the stream; the former one hears that it was taken."""
        former = group.subscriber
        if isinstance(former, GatewayConnection):
            former.reject(group.attachment, _TAKEN_OVER)
            former.let_go(group)
        self._orphans.remove(group)
        connection.attach(group, wanted.attachment, wanted.next_indices)

    def _detach(self, group: Group, connection: GatewayConnection, client_gone: bool) -> None:
        connection.let_go(group)
        self._orphans.add(group, client_gone)

    # Ends

    def _target(
        self, cancellation: scheduler_pb2.Cancellation, connection: GatewayConnection
    ) -> Group | None:
        if cancellation.WhichOneof("target") == "attachment":
            return connection.attached.get(cancellation.attachment)
        key = RequestKey(cancellation.request.principal, cancellation.request.request_id)
        return self._engine.live.get(key)

    def _cancel(self, group: Group | None) -> bool:
        if group is None or group.error is not None:
            return False
        self._engine.end(group, _CANCELLED)
        return True


def _say_again(
    stored: StoredRequest,
    wanted: _Submission | scheduler_pb2.Attachment,
    connection: GatewayConnection,
) -> None:
    """How a request went that is over."""
    error = error_of(stored)
    if error is not None:
        connection.reject(wanted.attachment, error)
        return
    group = restored(stored, {})
    for sequence in group.sequences:
        # What ended for no reason of its own was ended by its gateway, and will be again.
        sequence.end = sequence.end or End(EndReason.STOP_STRING, sequence.num_output_tokens)
        sequence.has_left = True
    connection.replay(group, wanted.attachment, wanted.next_indices)


def _finish(group: Group, finish: scheduler_pb2.Finish) -> None:
    if finish.choice < len(group.sequences):
        group.sequences[finish.choice].finish(finish.num_tokens)


def _check_version(frame: scheduler_pb2.ConnectRequest) -> None:
    if frame.HasField("hello") and frame.hello.protocol_version != PROTOCOL_VERSION:
        raise failed(
            StatusCode.FAILED_PRECONDITION,
            "PROTOCOL_VERSION",
            f"the scheduler speaks protocol version {PROTOCOL_VERSION}, "
            f"the gateway {frame.hello.protocol_version}",
        )


def _taken(request_id: str) -> RequestError:
    return failed(
        StatusCode.ALREADY_EXISTS,
        "REQUEST_ID_TAKEN",
        f"the id {request_id!r} belongs to another request, which runs or has just ended",
    )
