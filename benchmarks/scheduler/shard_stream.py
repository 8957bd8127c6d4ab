"""The load generator's stream to the leader of one shard."""

import asyncio
import sys
import time
from collections.abc import Callable

import grpc

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
        self, address: str, shard: int, on_over: Callable[[int], object], gateway: int = 0
    ) -> None:
        """`on_over` is called with the number of requests that have just ended."""
        self.is_ready = False
        self.num_submitted = 0
        self.num_accepted = 0
        self.num_ended = 0
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
        channel = grpc.aio.insecure_channel(
            address, options=channel_options(INTERNAL_MESSAGE_BYTES)
        )
        self._connect = channel.stream_stream(
            _METHOD,
            request_serializer=scheduler_pb2.ConnectRequest.SerializeToString,
            response_deserializer=self._parse,
        )
        self._queue: list[Request] = []
        self._wanted = asyncio.Event()
        self._started: set[int] = set()
        self._next_attachment = 1

    @property
    def num_started(self) -> int:
        return len(self._started)

    @property
    def num_live(self) -> int:
        return self.num_submitted - self.num_ended

    def submit(self, request: Request) -> None:
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

    def _submission(self, request: Request) -> scheduler_pb2.Submission:
        attachment, self._next_attachment = self._next_attachment, self._next_attachment + 1
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
        if len(self._started) < self._next_attachment - 1:
            self._started.update(frame.deltas.attachments)
        self.failures += [failure.message for failure in frame.failures]
        num_over = len(frame.choice_ends) + len(frame.failures)
        if num_over:
            self._count_live()
            self.num_ended += num_over
            self._on_over(num_over)

    def _count_live(self) -> None:
        """Call it before their number changes."""
        now_s = time.monotonic()
        self.live_s += self.num_live * (now_s - self._counted_s)
        self._counted_s = now_s
