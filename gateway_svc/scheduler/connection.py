"""The gateway's connection to the leader of one shard, re-established after each loss."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import grpc
import structlog

from gateway_svc.scheduler.leader_discovery import LeaderDiscovery
from gateway_svc.scheduler.leader_stream import LeaderStream, NotLeadingError, metadata_of
from gateway_svc.scheduler.multiplexer import Multiplexer, scheduler_unavailable
from gateway_svc.scheduler.outages import Outage
from gateway_svc.scheduler.send_queue import SendQueue
from quire.internal.v1 import operations_pb2, operations_pb2_grpc, scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.errors import RequestError, unavailable
from quire.service.http2.call_status import CallEnded
from quire.service.protocol_version import PROTOCOL_VERSION
from quire.service.tls import TLS, TLSError, open_aio_channel

log = structlog.get_logger()

# A stream that ends sooner is followed by a back-off, which doubles with each such stream in a row.
_SHORT_STREAM_S = 1.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_STATUS_TIMEOUT_S = 5.0


class ShardConnection:
    """Maintains one `Connect` stream to the leader of a shard; `requests` are multiplexed over it.

    `on_state` is called after the outage or its reason has changed, and `on_cluster` with the state
    of all shards, as this shard's leader sends it, before what else is in the frame. `on_standby`
    is called with the number of shards that a scheduler names which does not lead this one.
    """

    def __init__(
        self,
        shard: int,
        addresses: Sequence[str],
        requests: Multiplexer,
        on_state: Callable[[], object],
        on_cluster: Callable[[int, scheduler_pb2.ClusterState], object],
        on_standby: Callable[[int], object],
        tls: TLS | None,
    ) -> None:
        self.shard = shard
        self.requests = requests
        # The longest sequence that workers accept, as last reported; None until then.
        self.max_model_len: int | None = None
        # Why requests of the shard cannot run now; both None if they can.
        self.outage: Outage | None = Outage.SCHEDULER
        self.reason: str | None = "no scheduler has been found yet"
        self._tls = tls
        self._discovery = LeaderDiscovery(addresses, self._connect)
        self._on_state = on_state
        self._on_cluster = on_cluster
        self._on_standby = on_standby
        # The highest seen, on any stream. Epochs of different shards are not comparable.
        self._epoch = 0
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        # The leader, while it is connected.
        self._leader: LeaderStream | None = None
        # Why its status could not be read the last time; None if it was.
        self._status_failure: str | None = None

    @property
    def leader(self) -> str | None:
        """The address of the leader, while it is connected."""
        return None if self._leader is None else self._leader.address

    def start(self) -> None:
        """Connect, and reconnect until closed."""
        self._task = asyncio.create_task(self._run())

    async def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s`, and disconnect."""
        self._is_closing = True
        self.requests.send_queue.close()
        if self._task is not None:
            if not self.requests.is_connected:
                self._task.cancel()
            await asyncio.wait({self._task}, timeout=timeout_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def suggest(self, leader: str) -> None:
        """Name the address at which the leader is to be searched for first."""
        self._discovery.suggest(leader)

    async def status(self) -> operations_pb2.GetStatusResponse:
        """The status of the shard, with block maps. RequestError if it has no leader, or
        this one does not send it."""
        leader = self._leader
        if leader is None:
            raise scheduler_unavailable()
        request = operations_pb2.GetStatusRequest(with_block_maps=True, shard=self.shard)
        options = channel_options(INTERNAL_MESSAGE_BYTES)
        host = self._discovery.resolver.host_of(leader.address)
        try:
            opened = open_aio_channel(leader.address, options, self._tls, host)
        except TLSError as error:
            raise self._no_status(str(error)) from None
        async with opened as channel:
            operations = operations_pb2_grpc.OperationsServiceStub(channel)
            try:
                status = await operations.GetStatus(request, timeout=_STATUS_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                raise self._no_status(reason) from None
        self._status_failure = None
        return status

    def _no_status(self, reason: str) -> RequestError:
        """Log why the leader has no status, once: pages ask every second. It may have the names of
        files, which are not for every client."""
        if reason != self._status_failure:
            self._status_failure = reason
            log.warning("status not read", shard=self.shard, address=self.leader, reason=reason)
        message = "the status of the leader cannot be read; the gateway's log has the reason"
        return unavailable("SCHEDULER_AWAY", message)

    def _set_state(self, outage: Outage | None, reason: str | None) -> None:
        self.outage, self.reason = outage, reason
        self._on_state()

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._is_closing:
            leader = await self._discovery.find()
            connected_at = time.monotonic()
            self._leader = leader
            reason = "the connection is closing"
            try:
                reason = await self._run_stream(leader)
            finally:
                self._leader = None
                self._set_state(Outage.SCHEDULER, reason)
                self.requests.on_disconnected()
                leader.close()
            if self._is_closing:
                return
            # Logs only: the reason may mention another client's request.
            log.warning(
                "scheduler disconnected", shard=self.shard, address=leader.address, reason=reason
            )
            if time.monotonic() - connected_at > _SHORT_STREAM_S:
                backoff_s = _FIRST_BACKOFF_S
            else:
                # A scheduler that ends its streams soon after the hello must not cause a busy loop.
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _connect(self, address: str) -> LeaderStream:
        hello = scheduler_pb2.GatewayHello(protocol_version=PROTOCOL_VERSION, shard=self.shard)
        host = self._discovery.resolver.host_of(address)
        try:
            leader = await LeaderStream.open(address, hello, self._tls, host)
        except NotLeadingError as error:
            if error.leader:
                self.suggest(error.leader)
            self._on_standby(error.num_shards)
            raise
        try:
            self._check(leader.first_frame)
        except NotLeadingError as error:
            leader.close()
            self._set_state(Outage.SCHEDULER, str(error))
            raise
        return leader

    async def _run_stream(self, leader: LeaderStream) -> str:
        """Read and write one stream; return why it ended."""
        self.requests.on_connected()
        writer = asyncio.create_task(_write(leader, self.requests.send_queue))
        log.info(
            "scheduler connected",
            shard=self.shard,
            address=leader.address,
            epoch=leader.first_frame.epoch,
        )
        try:
            ended = await leader.run(self._receive)
        except NotLeadingError as error:
            return str(error)
        except Exception as error:
            # Reconnect: one bad frame must not end the task that serves all requests.
            log.exception("handling a frame of the scheduler failed")
            return f"handling its frame failed: {error!r}"
        finally:
            writer.cancel()
        if leader_now := metadata_of(ended).get("leader"):
            self.suggest(leader_now)
        is_ok = ended.code is grpc.StatusCode.OK
        return "the scheduler ended the stream" if is_ok else str(ended)

    def _check(self, frame: scheduler_pb2.ConnectResponse) -> None:
        if frame.epoch < self._epoch:
            raise NotLeadingError(f"its epoch is {frame.epoch}, older than {self._epoch}")
        if frame.HasField("hello") and frame.hello.protocol_version != PROTOCOL_VERSION:
            version = frame.hello.protocol_version
            raise NotLeadingError(f"its protocol version is {version}, not {PROTOCOL_VERSION}")

    def _receive(self, frame: scheduler_pb2.ConnectResponse) -> None:
        self._check(frame)
        self._epoch = frame.epoch
        if frame.HasField("hello"):
            hello = frame.hello
            if hello.HasField("max_model_len"):
                self.max_model_len = hello.max_model_len
            if hello.ready:
                self._set_state(None, None)
            else:
                self._set_state(Outage.WORKER, "no worker has joined the scheduler")
        if frame.HasField("cluster"):
            self._on_cluster(self.shard, frame.cluster)
        self.requests.deliver(frame)


async def _write(leader: LeaderStream, send_queue: SendQueue) -> None:
    # The end of the stream is reported by `run`.
    with contextlib.suppress(CallEnded):
        while (frame := await send_queue.get()) is not None:
            leader.send(frame)
            await leader.wait_sent()
        leader.half_close()
