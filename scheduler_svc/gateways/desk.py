"""What gateways ask for, done: their frames turned into calls of the engine."""

import asyncio
import itertools

from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, failed, unavailable
from quire.service.protocol import PROTOCOL_VERSION
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.sequence import Group
from scheduler_svc.engine import Engine
from scheduler_svc.gateways.connection import GatewayConnection
from scheduler_svc.gateways.submission import group_of, malformed, record_of
from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable
from scheduler_svc.store.requests import RequestKey
from scheduler_svc.store.store import Store

_CANCELLED = failed(StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")
_NO_REDIS = unavailable("REDIS_AWAY", "the scheduler has lost Redis or the lead")
_NOT_RESUMABLE = failed(
    StatusCode.NOT_FOUND, "NOT_RESUMABLE", "streams of known requests cannot be taken over"
)


class Desk:
    """Applies frames to the engine under one leadership; knows every open connection."""

    def __init__(self, engine: Engine, store: Store, recorder: Recorder) -> None:
        self._engine = engine
        self._store = store
        self._recorder = recorder
        self._connections: set[GatewayConnection] = set()
        self._submitting: set[asyncio.Task[None]] = set()
        self._draining = False
        self._hello = self._hello_now()
        # Unique across leaderships: a later epoch starts milliseconds, thus millions, above.
        self._sequence_ids = itertools.count(store.leadership.epoch << 22)

    def connect(self) -> GatewayConnection:
        connection = GatewayConnection(self._store.leadership.epoch)
        connection.say_hello(self._hello)
        self._connections.add(connection)
        return connection

    def disconnect(self, connection: GatewayConnection) -> None:
        """Ends the requests of a gateway that is gone, those being recorded included."""
        self._connections.discard(connection)
        for group in list(connection.attached.values()):
            self._cancel(group)

    def announce(self) -> None:
        """Tells every gateway where readiness or the model has changed."""
        hello = self._hello_now()
        if hello != self._hello:
            self._hello = hello
            for connection in self._connections:
                connection.say_hello(hello)

    def drain(self) -> None:
        """No new requests from here on."""
        self._draining = True
        self.announce()

    def close(self) -> None:
        """Ends every stream behind what has been said."""
        for connection in self._connections:
            connection.close(unavailable("STOPPING", "the scheduler is stopping"))

    def _hello_now(self) -> scheduler_pb2.SchedulerHello:
        model = self._engine.model
        return scheduler_pb2.SchedulerHello(
            protocol_version=PROTOCOL_VERSION,
            holder=self._store.leadership.holder,
            ready=bool(self._engine.lanes) and not self._draining,
            max_model_len=model.max_model_len if model else None,
        )

    async def apply(
        self, frame: scheduler_pb2.ConnectRequest, connection: GatewayConnection
    ) -> None:
        """Applies one frame. RequestError if the gateway is to be turned away."""
        _check_version(frame)
        if frame.submissions:
            await self._submit(list(frame.submissions), connection)
        for attachment in frame.attachments:
            connection.reject(attachment.attachment, _NOT_RESUMABLE)
        for finish in frame.finishes:
            if group := connection.attached.get(finish.attachment):
                _finish(group, finish)
                self._engine.stir(group)
        for detachment in frame.detachments:
            self._cancel(connection.attached.get(detachment.attachment))
        for cancellation in frame.cancellations:
            found = self._cancel(self._target(cancellation, connection))
            if cancellation.HasField("tag"):
                connection.answer_cancellation(cancellation.tag, found)

    async def _submit(
        self, submissions: list[scheduler_pb2.Submission], connection: GatewayConnection
    ) -> None:
        """Checks and records a frame's submissions in one go; recorded ones are accepted."""
        checked: list[tuple[scheduler_pb2.Submission, Group]] = []
        num_tokens = 0
        for submission in submissions:
            group = group_of(submission, self._sequence_ids, connection)
            refusal = self._refusal(submission, group) or self._engine.overload(
                len(checked) + 1, num_tokens + group.num_prompt_tokens
            )
            if refusal is None:
                checked.append((submission, group))
                num_tokens += group.num_prompt_tokens
            else:
                self._engine.stats.num_refused += 1
                connection.reject(submission.attachment, refusal)
        if checked:
            # Not cancelled with the stream: what is recorded is also submitted, and then ends.
            task = asyncio.create_task(self._record(checked, connection))
            self._submitting.add(task)
            task.add_done_callback(self._submitting.discard)
            await asyncio.shield(task)

    async def _record(
        self,
        checked: list[tuple[scheduler_pb2.Submission, Group]],
        connection: GatewayConnection,
    ) -> None:
        try:
            # An id may be used again as soon as its client has seen the end.
            await self._recorder.flush()
            recorded = await self._store.record(
                [
                    record_of(submission, group.sequences[0].sequence_id)
                    for submission, group in checked
                ]
            )
        except (StoreUnavailable, StaleEpoch):
            self._recorder.unanswered(group.key for _, group in checked)
            for submission, _ in checked:
                connection.reject(submission.attachment, _NO_REDIS)
            return
        for (submission, group), is_new in zip(checked, recorded, strict=True):
            if is_new:
                connection.accept(group, submission.opaque)
                self._engine.submit(group)
            else:
                connection.reject(submission.attachment, _already_live(submission.request_id))
        if connection not in self._connections:
            self.disconnect(connection)

    def _refusal(self, submission: scheduler_pb2.Submission, group: Group) -> RequestError | None:
        if self._draining:
            return unavailable("DRAINING", "the scheduler is stopping")
        return malformed(submission) or self._engine.refusal(group)

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


def _already_live(request_id: str) -> RequestError:
    return failed(
        StatusCode.ALREADY_EXISTS,
        "REQUEST_ID_LIVE",
        f"a request with the id {request_id!r} is running",
    )
