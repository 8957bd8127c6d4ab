"""`python -m benchmarks.scheduler.load CONTROL SCHEDULER`: a load generator.

Speaks the gateway's side of the Connect stream: submits requests and counts tokens. Does little
work per frame and none per token.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import grpc

from benchmarks.scheduler import control
from benchmarks.scheduler.workload import Request, Workload, requests
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.protocol_version import PROTOCOL_VERSION

# Submissions in one frame.
_MOST_PER_FRAME = 64
_RETRY_S = 0.1


class Load:
    """One stream and its requests."""

    def __init__(self, address: str) -> None:
        options = channel_options(INTERNAL_MESSAGE_BYTES)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(
            grpc.aio.insecure_channel(address, options=options)
        )
        self._loop = asyncio.get_running_loop()
        self._is_ready = False
        self._pending: Iterator[Request] = iter(())
        self._wanted = asyncio.Event()
        self._num_wanted = 0
        self._next_attachment = 1
        self._started: set[int] = set()
        self._num_accepted = 0
        self._num_ended = 0
        self._num_tokens = 0
        # Arrival of the last tokens: a rate between two such times covers whole steps.
        self._tokens_at_s = 0.0
        self._failures: list[str] = []

    async def run(self) -> None:
        """Retry until the scheduler accepts the stream, then serve it without end."""
        while True:
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                if self._is_ready:
                    raise
                print(f"not connected: {error.details()}", file=sys.stderr)
                await asyncio.sleep(_RETRY_S)

    # `start` and `progress` are called on the control thread.

    def start(self, **workload: object) -> None:
        """Submit the workload's requests, up to its concurrency at a time."""
        self._loop.call_soon_threadsafe(self._start, Workload(**workload))  # type: ignore[arg-type]

    def progress(self) -> dict[str, object]:
        return {
            "at_s": time.monotonic(),
            "tokens_at_s": self._tokens_at_s,
            "ready": self._is_ready,
            "accepted": self._num_accepted,
            "started": len(self._started),
            "ended": self._num_ended,
            "tokens": self._num_tokens,
            "failures": self._failures[:3],
        }

    def _start(self, workload: Workload) -> None:
        self._pending = requests(workload)
        self._num_wanted += workload.concurrency
        self._wanted.set()

    async def _serve(self) -> None:
        call = self._stub.Connect()
        hello = scheduler_pb2.GatewayHello(protocol_version=PROTOCOL_VERSION)
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
            batch = list(islice(self._pending, min(self._num_wanted, _MOST_PER_FRAME)))
            self._num_wanted -= len(batch)
            if not batch or not self._num_wanted:
                self._wanted.clear()
            if batch:
                submissions = [self._submission(request) for request in batch]
                await call.write(scheduler_pb2.ConnectRequest(submissions=submissions))

    def _submission(self, request: Request) -> scheduler_pb2.Submission:
        attachment, self._next_attachment = self._next_attachment, self._next_attachment + 1
        return scheduler_pb2.Submission(
            attachment=attachment,
            request_id=f"request-{attachment}",
            prompt_token_ids=request.prompt,
            params=scheduler_pb2.ResolvedParams(
                top_p=1, seed=attachment, max_tokens=request.max_tokens
            ),
        )

    def _take(self, frame: scheduler_pb2.ConnectResponse) -> None:
        if frame.HasField("hello"):
            self._is_ready = frame.hello.ready
        self._num_accepted += len(frame.acceptances)
        if num_tokens := len(frame.deltas.token_ids):
            self._num_tokens += num_tokens
            self._tokens_at_s = time.monotonic()
        if len(self._started) < self._next_attachment - 1:
            self._started.update(frame.deltas.attachments)
        self._failures += [failure.message for failure in frame.failures]
        num_over = len(frame.choice_ends) + len(frame.failures)
        if num_over:
            self._num_ended += num_over
            self._num_wanted += num_over
            self._wanted.set()


async def _main(path: Path, address: str) -> None:
    load = Load(address)
    control.serve(path, {"start": load.start, "progress": load.progress})
    await load.run()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2]))
