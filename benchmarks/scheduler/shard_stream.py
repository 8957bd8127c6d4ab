"""The load generator's stream to the leader of one shard."""

import asyncio
import sys
import time
from collections.abc import Callable

import grpc
from google.rpc import error_details_pb2

from benchmarks.scheduler.workload import Request
from quire.internal.v1 import scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.protocol_version import PROTOCOL_VERSION

_METHOD = "/quire.internal.v1.SchedulerService/Connect"
# Submissions in one frame.
_MOST_PER_FRAME = 64
_RETRY_S = 0.1


class ShardStream:
    """Submits requests and counts what comes back."""

    def __init__(
        self,
        address: str,
        shard: int,
        on_over: Callable[[int], object],
        on_moved: Callable[[scheduler_pb2.Submission, int], None],
        gateway: int = 0,
    ) -> None:
        """`on_over` is called with the number of requests that have just ended, `on_moved` with the
        submission of one that another shard has now, and that shard."""
        self.is_ready = False
        self.num_submitted = 0
        self.num_accepted = 0
        # With a first token.
        self.num_started = 0
        self.num_ended = 0
        # Requests that another shard has taken while they waited.
        self.num_moved = 0
        # The number of live requests, over time: seconds of all of them.
        self.live_s = 0.0
        self._counted_s = time.monotonic()
        self.num_tokens = 0
        self.num_frames = 0
        self.num_frame_bytes = 0
        # States of all shards, and their bytes.
        self.num_states = 0
        self.num_state_bytes = 0
        # Arrival of the last tokens: a rate between two such times covers whole steps.
        self.tokens_at_s = 0.0
        self.failures: list[str] = []
        # All shards, as the leader of this one has last reported.
        self.cluster = scheduler_pb2.ClusterState()
        self._shard = shard
        self._gateway = gateway
        self._on_over = on_over
        self._on_moved = on_moved
        channel = grpc.aio.insecure_channel(
            address, options=channel_options(INTERNAL_MESSAGE_BYTES)
        )
        self._connect = channel.stream_stream(
            _METHOD,
            request_serializer=scheduler_pb2.ConnectRequest.SerializeToString,
            response_deserializer=self._parse,
        )
        self._queue: list[Request | scheduler_pb2.Submission] = []
        # What was submitted and has no token yet, by attachment.
        self._waiting: dict[int, scheduler_pb2.Submission] = {}
        self._wanted = asyncio.Event()
        self._next_attachment = 1

    @property
    def num_live(self) -> int:
        return self.num_submitted - self.num_ended - self.num_moved

    def submit(self, request: Request | scheduler_pb2.Submission) -> None:
        """Submit a new request, or one that this shard has taken from another one."""
        self._count_live()
        self._queue.append(request)
        self.num_submitted += 1
        self._wanted.set()

    async def run(self) -> None:
        """Retry until the scheduler accepts the stream, then serve it without end."""
        while True:
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                if self.is_ready:
                    raise
                print(f"not connected: {error.details()}", file=sys.stderr)
                await asyncio.sleep(_RETRY_S)

    async def _serve(self) -> None:
        call = self._connect()
        hello = scheduler_pb2.GatewayHello(protocol_version=PROTOCOL_VERSION, shard=self._shard)
        await call.write(scheduler_pb2.ConnectRequest(hello=hello))
        writer = asyncio.create_task(self._write(call))
        try:
            async for frame in call:
                self._take(frame)
        finally:
            writer.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        while True:
            await self._wanted.wait()
            batch = self._queue[:_MOST_PER_FRAME]
            del self._queue[:_MOST_PER_FRAME]
            if not self._queue:
                self._wanted.clear()
            submissions = [self._submission(request) for request in batch]
            await call.write(scheduler_pb2.ConnectRequest(submissions=submissions))

    def _submission(self, request: Request | scheduler_pb2.Submission) -> scheduler_pb2.Submission:
        attachment, self._next_attachment = self._next_attachment, self._next_attachment + 1
        submission = self._new_submission(request, attachment)
        self._waiting[attachment] = submission
        return submission

    def _new_submission(
        self, request: Request | scheduler_pb2.Submission, attachment: int
    ) -> scheduler_pb2.Submission:
        if isinstance(request, scheduler_pb2.Submission):
            moved = scheduler_pb2.Submission()
            moved.CopyFrom(request)
            moved.attachment, moved.again = attachment, True
            return moved
        return scheduler_pb2.Submission(
            attachment=attachment,
            request_id=f"request-{self._gateway}-{self._shard}-{attachment}",
            prompt_token_ids=request.prompt,
            params=scheduler_pb2.ResolvedParams(
                top_p=1, seed=attachment, max_tokens=request.max_tokens
            ),
        )

    def _parse(self, data: bytes) -> scheduler_pb2.ConnectResponse:
        self.num_frames += 1
        self.num_frame_bytes += len(data)
        return scheduler_pb2.ConnectResponse.FromString(data)

    def _take(self, frame: scheduler_pb2.ConnectResponse) -> None:
        if frame.HasField("hello"):
            self.is_ready = frame.hello.ready
        if frame.HasField("cluster"):
            self.cluster = frame.cluster
            self.num_states += 1
            self.num_state_bytes += frame.cluster.ByteSize()
        self.num_accepted += len(frame.acceptances)
        if num_tokens := len(frame.deltas.token_ids):
            self.num_tokens += num_tokens
            self.tokens_at_s = time.monotonic()
        if self._waiting:
            for attachment in self._waiting.keys() & set(frame.deltas.attachments):
                del self._waiting[attachment]
                self.num_started += 1
        num_moved = sum(map(self._follow, frame.failures))
        num_over = len(frame.choice_ends) + len(frame.failures) - num_moved
        if num_over:
            self._count_live()
            self.num_ended += num_over
            self._on_over(num_over)

    def _follow(self, failure: scheduler_pb2.RequestFailure) -> bool:
        """Pass a request on to the shard that has it now; False if it has failed."""
        shard = _named_shard(failure)
        submission = self._waiting.pop(failure.attachment, None)
        if shard is None or submission is None:
            self.failures.append(failure.message)
            return False
        self._count_live()
        self.num_moved += 1
        self._on_moved(submission, shard)
        return True

    def _count_live(self) -> None:
        """Call it before their number changes."""
        now_s = time.monotonic()
        self.live_s += self.num_live * (now_s - self._counted_s)
        self._counted_s = now_s


def _named_shard(failure: scheduler_pb2.RequestFailure) -> int | None:
    """The shard that has a request now; None for any other failure."""
    info = error_details_pb2.ErrorInfo()
    for detail in failure.details:
        if detail.Unpack(info) and info.reason == "OTHER_SHARD":
            return int(info.metadata["shard"])
    return None
