"""Dispatches gateway frames to the engine."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress

from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import failed
from quire.service.protocol_version import PROTOCOL_VERSION
from scheduler_svc.core.sequence import Group, NullSubscriber
from scheduler_svc.engine.claims import Claims
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.moves import Moves
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.engine.tenant_exchange import TenantExchange
from scheduler_svc.gateway.attachments import Attachments
from scheduler_svc.gateway.connection import GatewayConnection, leadership_ended
from scheduler_svc.gateway.orphans import Orphans
from scheduler_svc.gateway.submissions import Submissions, other_shard
from scheduler_svc.leadership.lease import Lease
from scheduler_svc.store.errors import LeadershipLost, StaleEpoch
from scheduler_svc.store.requests import RequestKey
from scheduler_svc.store.store import Store
from scheduler_svc.tracing import request_phases


class FrameHandler:
    """Applies frames to the engine during one term; keeps the open connections."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        record_writer: RecordWriter,
        lease: Lease,
        orphan_grace_s: float,
        claims: Claims,
        moves: Moves,
        tenants: TenantExchange,
    ) -> None:
        self._engine = engine
        self._store = store
        self._lease = lease
        self._orphans = Orphans(orphan_grace_s, self._cancel, lambda: store.retry.unavailable_s)
        self._moves = moves
        self._attachments = Attachments(engine, store, record_writer, self._orphans, moves)
        self._submissions = Submissions(
            engine, store, record_writer, self._attachments, claims, moves, tenants
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[GatewayConnection] = set()
        self._is_closed = False
        self._announced_model = self._model_now()
        self._hello = self._make_hello()
        # The state of all shards, as last announced; empty at first.
        self._cluster = scheduler_pb2.ClusterState()
        # Recovered requests are orphans until their gateways have reconnected.
        for group in engine.live.values():
            self._orphans.add(group, client_gone=False)

    # Connections

    def connect(self) -> GatewayConnection:
        """Open a connection. RequestError when this term is over."""
        if self._is_closed:
            raise leadership_ended()
        connection = GatewayConnection(self._store.leadership.epoch, self._lease.wait_held)
        connection.send_hello(self._hello)
        connection.send_cluster(self._cluster)
        self._connections.add(connection)
        return connection

    def disconnect(self, connection: GatewayConnection) -> None:
        """Detach the requests of a disconnected gateway; not after the end of the term."""
        connection.is_disconnected = True
        if self._is_closed:
            return
        self._connections.discard(connection)
        for group in list(connection.attached.values()):
            self._attachments.detach(group, connection, client_gone=False)

    @property
    def num_gateways(self) -> int:
        return len(self._connections)

    def announce(self) -> None:
        """Send a new hello to every gateway if readiness or the model has changed."""
        if (model := self._model_now()) != self._announced_model:
            self._announced_model = model
            self._hello = self._make_hello()
            for connection in self._connections:
                connection.send_hello(self._hello)

    def announce_cluster(self, cluster: scheduler_pb2.ClusterState) -> None:
        """Send the state of all shards to every gateway if it has changed. That of a single shard
        is sent once."""
        is_same = cluster == self._cluster or (
            len(cluster.shards) == len(self._cluster.shards) == 1
        )
        if not is_same:
            self._cluster = cluster
            for connection in self._connections:
                connection.send_cluster(cluster)

    def give(self, group: Group, shard: int) -> None:
        """Send a request's gateway to the shard that has the request now."""
        self._orphans.remove(group)
        request_phases.move_request(group, shard)
        group.subscriber.failed(group, other_shard(shard))
        group.subscriber = NullSubscriber()

    def take(self, group: Group) -> None:
        """Wait for the gateway of a request that another shard has given."""
        self._orphans.add(group, client_gone=False)

    def close(self, successor: str = "") -> None:
        """End every stream after the output so far. Gateways then connect to the next leader, at
        the address of the `successor` if it is known, and resubmit what was not accepted."""
        self._is_closed = True
        self._orphans.close()
        self._submissions.close()
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            # Its requests may belong to another term when the gateway disconnects.
            connection.attached.clear()
            connection.close(leadership_ended(successor))
        self._connections.clear()

    def _model_now(self) -> tuple[bool, int | None]:
        """Whether a worker has joined, and max_model_len. Called many times a second."""
        model = self._engine.model
        return bool(self._engine.lanes), model.max_model_len if model else None

    def _make_hello(self) -> scheduler_pb2.SchedulerHello:
        ready, max_model_len = self._announced_model
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
        """Apply one frame. RequestError if the gateway must be disconnected."""
        _check_version(frame)
        if self._is_closed:
            return
        if frame.submissions:
            await self._submissions.submit(list(frame.submissions), connection)
        for attachment in frame.attachments:
            await self._attachments.attach_known(attachment, connection)
        for finish in frame.finishes:
            if group := connection.attached.get(finish.attachment):
                self._attachments.finish(group, finish)
            else:
                connection.note_for_wait(finish)
        for detachment in frame.detachments:
            if group := connection.attached.get(detachment.attachment):
                self._attachments.detach(group, connection, detachment.client_gone)
            else:
                connection.note_for_wait(detachment)
        for lookup in frame.lookups:
            self._start(self._look_up(lookup, connection))
        for cancellation in frame.cancellations:
            if cancellation.HasField("tag"):
                self._start(self._cancel_by_id(cancellation, connection))
            elif not self._cancel(self._target(cancellation, connection)):
                connection.note_for_wait(cancellation)

    async def _look_up(self, lookup: scheduler_pb2.Lookup, connection: GatewayConnection) -> None:
        key = RequestKey(lookup.request.principal, lookup.request.request_id)

        async def is_known() -> bool:
            if key in self._engine.live or await self._store.exists(key):
                return True
            # Another shard may have just given it.
            await self._moves.take()
            return key in self._engine.live

        connection.send_lookup_result(lookup.tag, await self._store.retry(is_known))

    async def _cancel_by_id(
        self, cancellation: scheduler_pb2.Cancellation, connection: GatewayConnection
    ) -> None:
        found = self._cancel_known(cancellation, connection)
        if found is None:
            # Another shard may have just given it.
            await self._store.retry(self._moves.take)
            found = self._cancel_known(cancellation, connection)
        connection.send_cancellation_result(cancellation.tag, bool(found))

    def _cancel_known(
        self, cancellation: scheduler_pb2.Cancellation, connection: GatewayConnection
    ) -> bool | None:
        """Cancel a request, also one that is not accepted yet. False if it has failed already,
        None if it is unknown."""
        target = self._target(cancellation, connection)
        if target is not None:
            return self._cancel(target)
        return self._submissions.pending.cancel(_key_of(cancellation)) or None

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(_unless_lost(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _target(
        self, cancellation: scheduler_pb2.Cancellation, connection: GatewayConnection
    ) -> Group | None:
        if cancellation.WhichOneof("target") == "attachment":
            return connection.attached.get(cancellation.attachment)
        key = _key_of(cancellation)
        return self._engine.live.get(key) or self._moves.giving.get(key)

    def _cancel(self, group: Group | None) -> bool:
        if group is None or group.error is not None:
            return False
        self._engine.cancel(group)
        return True


async def _unless_lost(work: Coroutine[None, None, None]) -> None:
    """Find out what a gateway asks. Without leadership there is no response: the term ends, and
    the gateway asks the next leader."""
    with suppress(LeadershipLost, StaleEpoch):
        await work


def _key_of(cancellation: scheduler_pb2.Cancellation) -> RequestKey:
    return RequestKey(cancellation.request.principal, cancellation.request.request_id)


def _check_version(frame: scheduler_pb2.ConnectRequest) -> None:
    if frame.HasField("hello") and frame.hello.protocol_version != PROTOCOL_VERSION:
        raise failed(
            StatusCode.FAILED_PRECONDITION,
            "PROTOCOL_VERSION",
            f"the scheduler has protocol version {PROTOCOL_VERSION}, "
            f"the gateway {frame.hello.protocol_version}",
        )
