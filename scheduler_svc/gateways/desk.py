"""What gateways ask for, done: their frames turned into calls of the engine."""

from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import failed
from quire.service.protocol import PROTOCOL_VERSION
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.sequence import Group
from scheduler_svc.engine import Engine
from scheduler_svc.gateways.attachments import Attachments
from scheduler_svc.gateways.connection import GatewayConnection, lead_ends
from scheduler_svc.gateways.orphans import Orphans
from scheduler_svc.gateways.submissions import Submissions
from scheduler_svc.store.requests import RequestKey
from scheduler_svc.store.store import Store
from scheduler_svc.tenure import Tenure

_CANCELLED = failed(StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")


class Desk:
    """Applies frames to the engine under one leadership; knows every open connection."""

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
        self._tenure = tenure
        self._orphans = Orphans(orphan_grace_s, self._cancel)
        self._attachments = Attachments(engine, store, recorder, self._orphans)
        self._submissions = Submissions(engine, store, recorder, self._attachments)
        self._connections: set[GatewayConnection] = set()
        self._is_closed = False
        self._model_told = self._model_now()
        self._hello = self._make_hello()
        # Restored requests are nobody's until their gateways have found us.
        for group in engine.live.values():
            self._orphans.add(group, client_gone=False)

    # Connections

    def connect(self) -> GatewayConnection:
        """RequestError when this leadership is over."""
        if self._is_closed:
            raise lead_ends()
        connection = GatewayConnection(self._store.leadership.epoch, self._tenure.held)
        connection.say_hello(self._hello)
        self._connections.add(connection)
        return connection

    def disconnect(self, connection: GatewayConnection) -> None:
        """Detaches the requests of a gateway that is gone. When this leadership is over they are
        not its own any more."""
        connection.is_gone = True
        if self._is_closed:
            return
        self._connections.discard(connection)
        for group in list(connection.attached.values()):
            self._attachments.detach(group, connection, client_gone=False)

    def announce(self) -> None:
        """Tells every gateway where readiness or the model has changed."""
        if (model := self._model_now()) != self._model_told:
            self._model_told = model
            self._hello = self._make_hello()
            for connection in self._connections:
                connection.say_hello(self._hello)

    def close(self) -> None:
        """Ends every stream behind what has been said: gateways are to look for the next leader,
        with what they have not had an answer to."""
        self._is_closed = True
        self._orphans.close()
        self._submissions.close()
        for connection in self._connections:
            # Its requests may be another leadership's by the time that the gateway has gone.
            connection.attached.clear()
            connection.close(lead_ends())
        self._connections.clear()

    def _model_now(self) -> tuple[bool, int | None]:
        """Whether some worker is there, and its limit. Looked at many times a second."""
        model = self._engine.model
        return bool(self._engine.lanes), model.max_model_len if model else None

    def _make_hello(self) -> scheduler_pb2.SchedulerHello:
        ready, max_model_len = self._model_told
        return scheduler_pb2.SchedulerHello(
            protocol_version=PROTOCOL_VERSION,
            holder=self._store.leadership.holder,
            ready=ready,
            max_model_len=max_model_len,
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
            await self._submissions.submit(list(frame.submissions), connection)
        for attachment in frame.attachments:
            await self._attachments.attach_known(attachment, connection)
        for finish in frame.finishes:
            if group := connection.attached.get(finish.attachment):
                _finish(group, finish)
                self._engine.stir(group)
        for detachment in frame.detachments:
            if group := connection.attached.get(detachment.attachment):
                self._attachments.detach(group, connection, detachment.client_gone)
        for cancellation in frame.cancellations:
            found = self._cancel(self._target(cancellation, connection))
            if cancellation.HasField("tag"):
                connection.answer_cancellation(cancellation.tag, found)

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
