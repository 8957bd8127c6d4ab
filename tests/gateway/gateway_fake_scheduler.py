"""A scheduler scripted by tests, behind a real gRPC server."""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple

import grpc
from grpc_servers import server_options

from quire.internal.v1 import scheduler_pb2 as pb
from quire.internal.v1 import scheduler_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.errors import abort, unavailable
from quire.service.protocol_version import PROTOCOL_VERSION

MAX_MODEL_LEN = 64

StreamRequest = pb.Submission | pb.Attachment


class Entry(NamedTuple):
    """A token's log-probability and rank."""

    token_id: int
    logprob: float
    rank: int


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves one gateway at a time and queues the parts of its frames by kind. Refuses gateways
    while `leads` is False, and those for another shard, with the leader's address if it is known.
    """

    def __init__(self, shard: int = 0) -> None:
        self.shard = shard
        # By shard.
        self.leaders: dict[int, str] = {}
        # As a standby names it; 0 if it does not.
        self.num_shards = 0
        # In the first frame, if it is set.
        self.cluster: pb.ClusterState | None = None
        self.hello = pb.SchedulerHello(
            protocol_version=PROTOCOL_VERSION,
            holder=b"fake",
            ready=True,
            max_model_len=MAX_MODEL_LEN,
        )
        self.epoch = 7
        self.leads = True
        self.ends_streams = False
        self.num_connects = 0
        self.connected = asyncio.Event()
        self.submissions = asyncio.Queue[pb.Submission]()
        self.attachments = asyncio.Queue[pb.Attachment]()
        self.finishes = asyncio.Queue[pb.Finish]()
        self.detachments = asyncio.Queue[pb.Detachment]()
        self.cancellations = asyncio.Queue[pb.Cancellation]()
        self.lookups = asyncio.Queue[pb.Lookup]()
        self.num_frames = 0
        self._frames = asyncio.Queue[pb.ConnectResponse | None]()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> int:
        self._server = grpc.aio.server(options=server_options(INTERNAL_MESSAGE_BYTES))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def Connect(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any
    ) -> AsyncIterator[pb.ConnectResponse]:
        self.num_connects += 1
        first = await anext(aiter(request_iterator))
        assert first.hello.protocol_version == PROTOCOL_VERSION
        if not self.leads or first.hello.shard != self.shard:
            leader = self.leaders.get(first.hello.shard)
            metadata = {"leader": leader} if leader else {}
            if self.num_shards:
                metadata["num_shards"] = str(self.num_shards)
            message = "this scheduler does not lead"
            await abort(context, unavailable("STANDBY", message, metadata=metadata))
        self._frames = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield pb.ConnectResponse(epoch=self.epoch, hello=self.hello, cluster=self.cluster)
            self.connected.set()
            if self.ends_streams:
                return
            while (frame := await self._frames.get()) is not None:
                yield frame
        finally:
            self.connected.clear()
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.ConnectRequest]) -> None:
        async for frame in requests:
            self.num_frames += 1
            for submission in frame.submissions:
                self.submissions.put_nowait(submission)
            for attachment in frame.attachments:
                self.attachments.put_nowait(attachment)
            for finish in frame.finishes:
                self.finishes.put_nowait(finish)
            for cancellation in frame.cancellations:
                self.cancellations.put_nowait(cancellation)
            for lookup in frame.lookups:
                self.lookups.put_nowait(lookup)
            for detachment in frame.detachments:
                self.detachments.put_nowait(detachment)
        self.drop_stream()

    def drop_stream(self) -> None:
        self._frames.put_nowait(None)

    def send(self, **parts: Any) -> None:
        self._frames.put_nowait(pb.ConnectResponse(**{"epoch": self.epoch, **parts}))

    def accept(self, wanted: StreamRequest, opaque: bytes = b"", **parts: Any) -> None:
        generation = (
            wanted.attachment_generation
            if wanted.HasField("attachment_generation")
            else pb.AttachmentGeneration(epoch=self.epoch, number=1)
        )
        acceptance = pb.Acceptance(
            attachment=wanted.attachment, opaque=opaque, attachment_generation=generation
        )
        self.send(acceptances=[acceptance], **parts)

    def write(
        self, submission: StreamRequest, first: int, token_ids: Sequence[int], choice: int = 0
    ) -> None:
        self.send(deltas=deltas(Delta(submission, first, token_ids, choice)))

    def end(
        self,
        submission: StreamRequest,
        num_tokens: int,
        reason: pb.EndReason.ValueType = pb.END_REASON_LENGTH,
        **parts: Any,
    ) -> None:
        self.send(choice_ends=[choice_end(submission, num_tokens, reason, **parts)])

    def fail(self, submission: StreamRequest, code: grpc.StatusCode, **parts: Any) -> None:
        failure = pb.RequestFailure(
            attachment=submission.attachment, code=code.value[0], message="no", **parts
        )
        self.send(failures=[failure])

    def found(self, query: pb.Lookup | pb.Cancellation, found: bool) -> None:
        if isinstance(query, pb.Lookup):
            self.send(lookup_results=[pb.LookupResult(tag=query.tag, found=found)])
        else:
            self.send(cancellation_results=[pb.CancellationResult(tag=query.tag, found=found)])

    async def serve_one(self, token_ids: Sequence[int]) -> pb.Submission:
        """Accept the next request and send its whole output."""
        submission = await self.submissions.get()
        self.accept(submission)
        self.write(submission, 0, token_ids)
        self.end(submission, len(token_ids))
        return submission


class Delta(NamedTuple):
    """New tokens of one choice."""

    submission: StreamRequest
    first: int
    token_ids: Sequence[int]
    choice: int = 0
    # For each token its own entry and the most likely ones; empty unless requested.
    logprobs: Sequence[Sequence[Entry]] = ()
    # The same of the prompt's tokens after the first one.
    prompt_logprobs: Sequence[Sequence[Entry]] = ()


def deltas(*entries: Delta) -> pb.TokenDeltas:
    return pb.TokenDeltas(
        attachments=[entry.submission.attachment for entry in entries],
        choices=[entry.choice for entry in entries],
        first_indices=[entry.first for entry in entries],
        token_ids=[id_ for entry in entries for id_ in entry.token_ids],
        num_tokens=[len(entry.token_ids) for entry in entries],
        num_logprobs=_counts(entries),
        logprobs=pack(e for entry in entries for token in entry.logprobs for e in token),
        prompt_logprobs=[
            pb.PromptLogprobs(entry=at, logprobs=pack(e for token in found for e in token))
            for at, found in enumerate(entry.prompt_logprobs for entry in entries)
            if found
        ],
    )


def _counts(deltas: Sequence[Delta]) -> list[int]:
    counts = [len(delta.logprobs[0]) if delta.logprobs else 0 for delta in deltas]
    return counts if any(counts) else []


def pack(entries: Iterable[Entry]) -> bytes:
    return b"".join(struct.pack("<IfI", *entry) for entry in entries)


def choice_end(
    submission: StreamRequest,
    num_tokens: int,
    reason: pb.EndReason.ValueType = pb.END_REASON_LENGTH,
    **parts: Any,
) -> pb.ChoiceEnd:
    return pb.ChoiceEnd(
        attachment=submission.attachment, reason=reason, num_tokens=num_tokens, **parts
    )
