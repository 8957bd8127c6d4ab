"""Which stream hears of a request: the newest that asked for it, or none for a while."""

from itertools import count

from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, failed, unavailable
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.restoring import error_of, restored
from scheduler_svc.core.sequence import End, EndReason, Group
from scheduler_svc.engine import Engine
from scheduler_svc.gateways.connection import GatewayConnection
from scheduler_svc.gateways.orphans import Orphans
from scheduler_svc.gateways.submission import key_of
from scheduler_svc.store.errors import StoreError
from scheduler_svc.store.requests import RequestState, StoredRequest
from scheduler_svc.store.store import Store

NO_REDIS = unavailable("REDIS_AWAY", "the scheduler has lost Redis or the lead")
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

Wanted = scheduler_pb2.Submission | scheduler_pb2.Attachment


class Attachments:
    """Attaches streams to requests that run, and says again how those went that are over."""

    def __init__(self, engine: Engine, store: Store, recorder: Recorder, orphans: Orphans) -> None:
        self._engine = engine
        self._store = store
        self._recorder = recorder
        self._orphans = orphans
        self._numbers = count(1)

    def attach(self, group: Group, connection: GatewayConnection, wanted: Wanted) -> None:
        """The newest attachment has the stream; the other one hears that it was taken. A gateway
        that was away, or has gone while its answer was on its way, does not take back what a client
        has gone on with at another one."""
        turn, former = self._turn(wanted, connection), group.subscriber
        if isinstance(former, GatewayConnection):
            if connection.is_gone or turn < group.turn:
                connection.reject(wanted.attachment, _TAKEN_OVER)
                return
            former.reject(group.attachment, _TAKEN_OVER)
            former.let_go(group)
        self._orphans.remove(group)
        group.turn = turn
        is_patient = isinstance(wanted, scheduler_pb2.Submission) and wanted.patient
        connection.attach(group, wanted.attachment, wanted.next_indices, is_patient)
        if connection.is_gone:
            self.detach(group, connection, client_gone=False)

    def attach_if_same(
        self, submission: scheduler_pb2.Submission, group: Group, connection: GatewayConnection
    ) -> None:
        """Refuses another request of the same id."""
        if submission.digest == group.terms.digest:
            self.attach(group, connection, submission)
        else:
            connection.reject(submission.attachment, id_taken(submission.request_id))

    async def attach_known(self, wanted: Wanted, connection: GatewayConnection) -> None:
        """Attaches to a request that runs; one that has ended is said again from its record."""
        key = key_of(wanted)
        try:
            await self._recorder.settle({key})
            stored = None if key in self._engine.live else await self._store.load(key)
        except StoreError:
            connection.reject(wanted.attachment, NO_REDIS)
            return
        # Looked for after the waiting, in which it may have come.
        if group := self._engine.live.get(key):
            self.attach(group, connection, wanted)
        elif stored is None and isinstance(wanted, scheduler_pb2.Attachment):
            connection.reject(wanted.attachment, _UNKNOWN)
        elif stored is None or stored.state is RequestState.LIVE:
            # A submission's was there a moment ago, and can begin anew; or it is of a leadership
            # whose requests are not taken up yet, or not any more.
            connection.reject(wanted.attachment, NO_REDIS)
        else:
            _say_again(stored, wanted, connection)

    async def attach_finished(
        self, submission: scheduler_pb2.Submission, connection: GatewayConnection
    ) -> bool:
        """Attaches to a request that has finished, or has begun meanwhile; False if there is
        none."""
        key = key_of(submission)
        try:
            await self._recorder.settle({key})
            stored = await self._store.load(key)
        except StoreError:
            connection.reject(submission.attachment, NO_REDIS)
            return True
        if group := self._engine.live.get(key):
            self.attach_if_same(submission, group, connection)
            return True
        if stored is None or stored.state is not RequestState.FINISHED:
            return False
        if submission.digest == stored.record.digest:
            _say_again(stored, submission, connection)
        else:
            connection.reject(submission.attachment, id_taken(submission.request_id))
        return True

    def detach(self, group: Group, connection: GatewayConnection, client_gone: bool) -> None:
        """Nobody hears of it, until somebody attaches to it or its grace is over."""
        connection.let_go(group)
        self._orphans.add(group, client_gone)

    def _turn(self, wanted: Wanted, connection: GatewayConnection) -> tuple[int, int]:
        if wanted.HasField("turn"):
            return wanted.turn.epoch, wanted.turn.number
        return connection.epoch, next(self._numbers)


def _say_again(
    stored: StoredRequest,
    wanted: Wanted,
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


def id_taken(request_id: str) -> RequestError:
    return failed(
        StatusCode.ALREADY_EXISTS,
        "REQUEST_ID_TAKEN",
        f"the id {request_id!r} belongs to another request, which runs or has just ended",
    )
