"""Attaches gateway streams to requests; the newest attachment of a request receives its output."""

from itertools import count

from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, failed, unavailable
from scheduler_svc.core.request import DEFERRED_TOKENS, End, EndReason
from scheduler_svc.core.sequence import Generation, Group
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.moves import Moves
from scheduler_svc.engine.record_conversion import error_of, from_record
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.gateway.connection import GatewayConnection
from scheduler_svc.gateway.orphans import Orphans
from scheduler_svc.store.errors import StoreError
from scheduler_svc.store.requests import RequestKey, RequestState, StoredRequest
from scheduler_svc.store.store import Store

_ENDING = unavailable(
    "REQUEST_ENDING",
    "the request of this id was cancelled and is about to end; send it again",
    metadata={"resumable": "true"},
)
NO_REDIS = unavailable("REDIS_AWAY", "the scheduler has lost Redis or leadership")
_UNKNOWN = failed(
    StatusCode.NOT_FOUND,
    "UNKNOWN_REQUEST",
    "no such request is known, or its record has expired",
    metadata={"resumable": "false"},
)
_TAKEN_OVER = failed(
    StatusCode.ABORTED,
    "TAKEN_OVER",
    "another stream has taken the request over",
    metadata={"resumable": "true"},
)

AttachRequest = scheduler_pb2.Submission | scheduler_pb2.Attachment


class Attachments:
    """Attaches streams to running requests, and replays ended ones from their records."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        record_writer: RecordWriter,
        orphans: Orphans,
        moves: Moves,
    ) -> None:
        self._engine = engine
        self._store = store
        self._record_writer = record_writer
        self._orphans = orphans
        self._moves = moves
        self._numbers = count(1)

    def attach(self, group: Group, connection: GatewayConnection, request: AttachRequest) -> None:
        """Move a request's stream to this attachment, and fail the previous one with TAKEN_OVER. A
        disconnected gateway, or a generation older than the current attachment's, is refused: the
        client may have resumed at another gateway."""
        generation, previous = self._generation(request, connection), group.subscriber
        if isinstance(previous, GatewayConnection):
            if connection.is_disconnected or generation < group.attachment_generation:
                connection.reject(request.attachment, _TAKEN_OVER)
                return
            previous.reject(group.attachment, _TAKEN_OVER)
            previous.unsubscribe(group)
        self._orphans.remove(group)
        group.attachment_generation = generation
        connection.attach(
            group, request.attachment, request.next_indices, _tokens_per_frame(request)
        )
        if connection.is_disconnected:
            self.detach(group, connection, client_gone=False)

    def attach_if_same(
        self, submission: scheduler_pb2.Submission, group: Group, connection: GatewayConnection
    ) -> None:
        """Attach a submission to its request; refuse a different request of the same id. One that
        was cancelled begins again, when the lane has released it: a moment later."""
        if submission.digest != group.record.digest:
            connection.reject(submission.attachment, id_taken(submission.request_id))
        elif not submission.again and _is_cancelled(group):
            connection.reject(submission.attachment, _ENDING)
        else:
            self.attach(group, connection, submission)

    async def attach_known(self, request: AttachRequest, connection: GatewayConnection) -> None:
        """Attach to a running request; replay one that has ended. One that is about to end
        with an error counts as ended."""
        key = key_of(request)
        try:
            await self._record_writer.sync({key})
            stored = None if key in self._engine.live else await self._store.load(key)
            if stored is None and key not in self._engine.live:
                await self._moves.take()
        except StoreError:
            connection.reject(request.attachment, NO_REDIS)
            return
        # Looked up after the calls: it may have been submitted meanwhile.
        if group := self._engine.live.get(key):
            if isinstance(request, scheduler_pb2.Attachment) and group.error is not None:
                # Not taken over: its stream is about to receive the error.
                connection.reject(request.attachment, group.error, group.record.opaque)
            else:
                self.attach(group, connection, request)
        elif stored is None and isinstance(request, scheduler_pb2.Attachment):
            connection.reject(request.attachment, _UNKNOWN)
        elif stored is None or stored.state is RequestState.LIVE:
            # The record of a submission has just expired: the gateway may submit again. Or this
            # term has not recovered the request yet, or is over.
            connection.reject(request.attachment, NO_REDIS)
        else:
            _replay_ended(stored, request, connection)

    async def attach_finished(
        self, submission: scheduler_pb2.Submission, connection: GatewayConnection
    ) -> bool:
        """Attach to a request that has finished, or has started meanwhile; False if none has."""
        key = key_of(submission)
        try:
            await self._record_writer.sync({key})
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
            _replay_ended(stored, submission, connection)
        else:
            connection.reject(submission.attachment, id_taken(submission.request_id))
        return True

    def finish(self, group: Group, finish: scheduler_pb2.Finish) -> None:
        """End a choice where the gateway has found the end in its text."""
        if group.beams is None and finish.choice < len(group.sequences):
            group.sequences[finish.choice].end_in_text(finish.num_tokens)
            self._engine.finish_ended(group)

    def detach(self, group: Group, connection: GatewayConnection, client_gone: bool) -> None:
        """Detach a request; it is cancelled unless a stream attaches within its grace period."""
        connection.unsubscribe(group)
        self._orphans.add(group, client_gone)

    def _generation(self, request: AttachRequest, connection: GatewayConnection) -> Generation:
        if request.HasField("attachment_generation"):
            had = request.attachment_generation
            return not had.is_of_former_shard, had.epoch, had.number
        return True, connection.epoch, next(self._numbers)


def _is_cancelled(group: Group) -> bool:
    return group.error is not None and group.error.code is StatusCode.CANCELLED


def _replay_ended(
    stored: StoredRequest,
    request: AttachRequest,
    connection: GatewayConnection,
) -> None:
    """Send an ended request's output and end, or its error."""
    error = error_of(stored)
    if error is not None:
        connection.reject(request.attachment, error, stored.record.opaque)
        return
    group = from_record(stored, {})
    for sequence in group.outputs:
        # Without an end of its own it was ended by its gateway.
        sequence.end = sequence.end or End(EndReason.STOP_STRING, sequence.num_output_tokens)
        sequence.is_finished = True
    connection.replay(group, request.attachment, request.next_indices)


def _tokens_per_frame(request: AttachRequest) -> int:
    if isinstance(request, scheduler_pb2.Submission) and request.deferred_delivery:
        return DEFERRED_TOKENS
    return min(max(1, request.stream_interval), DEFERRED_TOKENS - 1)


def key_of(request: AttachRequest) -> RequestKey:
    return RequestKey(request.principal, request.request_id)


def id_taken(request_id: str) -> RequestError:
    return failed(
        StatusCode.ALREADY_EXISTS,
        "REQUEST_ID_TAKEN",
        f"the id {request_id!r} belongs to another request, which is live or has just ended",
    )
