"""Real schedulers between KV-checking workers and gateway streams, over real gRPC and Redis."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from pathlib import Path

import grpc
import redis
from checking_worker import CheckingWorker, entries_at, token_at
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from waiting import until

from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2_grpc
from quire.service.lifecycle import Signals
from quire.service.protocol_version import PROTOCOL_VERSION
from scheduler_svc.core.request import seed_of_choice
from scheduler_svc.engine.engine import Engine
from scheduler_svc.lane.lane import Lane
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.server import Scheduler
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.term import Term

KEYS = ShardKeys(0)

CANCELLED, ALREADY_EXISTS, NOT_FOUND, ABORTED, INTERNAL, UNAVAILABLE = 1, 6, 5, 10, 13, 14


def info_of(error: grpc.aio.AioRpcError | scheduler_pb2.RequestFailure) -> Message:
    """The error's ErrorInfo: its reason and metadata."""
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error) if isinstance(error, grpc.aio.AioRpcError) else error
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details), status
    return info


def prompt(length: int, tag: int = 0) -> list[int]:
    return [tag * 100 + index % 97 for index in range(length)]


@dataclass
class ReceivedChoice:
    """What a gateway has received of one choice."""

    token_ids: list[int] = field(default_factory=list)
    end: scheduler_pb2.ChoiceEnd | None = None


@dataclass
class Received:
    """A submission and what its gateway has received of it."""

    submission: scheduler_pb2.Submission
    choices: list[ReceivedChoice]
    accepted: bool = False
    opaque: bytes = b""
    attachment_generation: scheduler_pb2.AttachmentGeneration | None = None
    failure: scheduler_pb2.RequestFailure | None = None
    # The scheduler may have lost what was delivered; it delivers the same tokens again.
    is_redelivered: bool = False

    @property
    def seed(self) -> int:
        return self.submission.params.seed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submission.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        return self.submission.params.max_tokens

    @property
    def stop_token_ids(self) -> Sequence[int]:
        return self.submission.params.stop_token_ids

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def end(self) -> scheduler_pb2.ChoiceEnd | None:
        return self.choices[0].end

    @property
    def next_indices(self) -> list[int]:
        return [len(choice.token_ids) for choice in self.choices]

    @property
    def is_ended(self) -> bool:
        return self.failure is not None or all(choice.end for choice in self.choices)

    @property
    def is_whole(self) -> bool:
        """Whether every choice has ended with exactly its expected tokens."""
        return all(
            choice.end is not None
            and choice.token_ids == self.output(index)
            and choice.end.num_tokens == len(choice.token_ids)
            for index, choice in enumerate(self.choices)
        )

    def tokens(self, count: int, choice: int = 0) -> list[int]:
        """The first expected tokens of a choice, ignoring stops."""
        seed = seed_of_choice(self.seed, choice)
        first = self.num_prompt_tokens
        return [token_at(seed, position) for position in range(first, first + count)]

    def entries(self, choice: int, index: int) -> list[tuple[int, float, int]]:
        """The expected log-probabilities of a token."""
        seed, position = seed_of_choice(self.seed, choice), self.num_prompt_tokens + index
        return entries_at(seed, position, self.submission.params.num_logprobs)

    @property
    def prompt_entries(self) -> list[tuple[int, float, int]]:
        """The expected log-probabilities of the prompt, concatenated."""
        width, tokens = self.submission.params.num_prompt_logprobs, self.submission.prompt_token_ids
        return [
            entry
            for position in range(1, len(tokens))
            for entry in entries_at(self.seed, position, width, tokens[position])
        ]

    def output(self, choice: int = 0) -> list[int]:
        """The expected output of a choice that runs undisturbed."""
        tokens = self.tokens(self.max_tokens, choice)
        ends = [index for index, token in enumerate(tokens) if token in self.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens


class Gateway:
    """A gateway's end of one Connect stream. Every token must arrive once, in order, from the
    requested index on, with its log-probabilities; those of the prompt with the first token."""

    def __init__(self, channel: grpc.aio.Channel, shard: int = 0) -> None:
        self.received: dict[int, Received] = {}
        # The state of all shards, as last sent.
        self.cluster: scheduler_pb2.ClusterState | None = None
        self.found: dict[int, bool] = {}
        self.hello: scheduler_pb2.SchedulerHello | None = None
        self.epoch = 0
        # Frames with tokens.
        self.num_token_frames = 0
        self.cancelled: dict[int, bool] = {}
        # How the stream ended, if it did.
        self.lost: grpc.aio.AioRpcError | None = None
        # Not written to the call directly: a write at the end of the stream would hide its error.
        self._frames: asyncio.Queue[scheduler_pb2.ConnectRequest] = asyncio.Queue()
        self._call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect(self._requests())
        self._reader = asyncio.create_task(self._read())
        self._next = 1
        self._shard = shard

    async def start(self) -> None:
        hello = scheduler_pb2.GatewayHello(protocol_version=PROTOCOL_VERSION, shard=self._shard)
        await self.send(hello=hello)

    async def _requests(self) -> AsyncIterator[scheduler_pb2.ConnectRequest]:
        while True:
            yield await self._frames.get()

    async def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        seed: int = 1,
        request_id: str | None = None,
        stop_token_ids: tuple[int, ...] = (),
        n: int = 1,
        num_logprobs: int = 0,
        num_prompt_logprobs: int = 0,
        num_lookahead_tokens: int = 0,
        without_drafts: bool = False,
        **fields: object,
    ) -> int:
        """Submit a request; `fields` are other fields of the submission. Its attachment."""
        fields.setdefault("digest", repr((prompt, max_tokens, seed, n)).encode())
        submission = scheduler_pb2.Submission(
            request_id=request_id or f"request-{self._next}",
            prompt_token_ids=prompt,
            n=n,
            params=scheduler_pb2.ResolvedParams(
                top_p=1,
                seed=seed,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                num_logprobs=num_logprobs,
                num_prompt_logprobs=num_prompt_logprobs,
                num_lookahead_tokens=num_lookahead_tokens,
                without_drafts=without_drafts,
            ),
            **fields,
        )
        return await self._submit(Received(submission, [ReceivedChoice() for _ in range(n)]))

    async def submit_again(self, received: Received) -> int:
        """Resubmit after the loss of a scheduler, from the next missing token on."""
        submission = scheduler_pb2.Submission()
        submission.CopyFrom(received.submission)
        submission.again = True
        return await self._submit(_without_ends(submission, received))

    async def attach_again(self, received: Received) -> int:
        """Attach, instead of resubmitting, from the next missing token on."""
        return await self._attach(_without_ends(received.submission, received))

    async def _submit(self, received: Received) -> int:
        submission = received.submission
        attachment = submission.attachment = self._register(received)
        submission.next_indices[:] = received.next_indices
        if received.attachment_generation is not None:
            submission.attachment_generation.CopyFrom(received.attachment_generation)
        await self.send(submissions=[submission])
        return attachment

    async def attach(self, received: Received, *next_indices: int) -> int:
        """Attach for a client of another gateway that has `next_indices` tokens."""
        choices = [
            ReceivedChoice(received.output(choice)[: next_indices[choice] if next_indices else 0])
            for choice in range(len(received.choices))
        ]
        return await self._attach(Received(received.submission, choices))

    async def _attach(self, received: Received) -> int:
        attachment = self._register(received)
        # The former attachment keeps its own.
        submission = scheduler_pb2.Submission()
        submission.CopyFrom(received.submission)
        submission.attachment = attachment
        received.submission = submission
        wanted = scheduler_pb2.Attachment(
            attachment=attachment,
            request_id=received.submission.request_id,
            principal=received.submission.principal,
            next_indices=received.next_indices,
            attachment_generation=received.attachment_generation,
        )
        await self.send(attachments=[wanted])
        return attachment

    def _register(self, received: Received) -> int:
        attachment, self._next = self._next, self._next + 1
        self.received[attachment] = received
        return attachment

    async def send(self, **parts: object) -> None:
        self._frames.put_nowait(scheduler_pb2.ConnectRequest(**parts))

    async def detach(self, attachment: int, client_gone: bool) -> None:
        detachment = scheduler_pb2.Detachment(attachment=attachment, client_gone=client_gone)
        await self.send(detachments=[detachment])

    async def cancel(self, attachment: int) -> None:
        await self.send(cancellations=[scheduler_pb2.Cancellation(attachment=attachment)])

    async def wait_ended(self, *attachments: int) -> list[Received]:
        """Wait for the ends of these requests; of all, without arguments."""
        received = [self.received[a] for a in attachments or self.received]
        await until(
            lambda: self.check() or all(one.is_ended for one in received),
            "the ends of all requests",
        )
        return received

    def check(self) -> None:
        """Raise the error of a frame that broke a rule."""
        if self._reader.done() and not self._reader.cancelled():
            self._reader.result()

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait({self._reader})
        self.check()

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                self._take(frame)
        except grpc.aio.AioRpcError as error:
            self.lost = error

    def _take(self, frame: scheduler_pb2.ConnectResponse) -> None:
        assert self.epoch in (0, frame.epoch), "a stream has one epoch"
        self.epoch = frame.epoch
        if frame.HasField("hello"):
            self.hello = frame.hello
        for acceptance in frame.acceptances:
            received = self.received[acceptance.attachment]
            received.accepted, received.opaque = True, acceptance.opaque
            received.attachment_generation = acceptance.attachment_generation
        self._take_tokens(frame.deltas)
        self.num_token_frames += bool(frame.deltas.token_ids)
        for end in frame.choice_ends:
            choice = self.received[end.attachment].choices[end.choice]
            assert choice.end is None, "a choice ends once"
            choice.end = end
        for failure in frame.failures:
            received = self.received[failure.attachment]
            assert received.failure is None, "a request fails once"
            received.failure = failure
        if frame.HasField("cluster"):
            self.cluster = frame.cluster
        for result in frame.cancellation_results:
            self.cancelled[result.tag] = result.found
        for result in frame.lookup_results:
            self.found[result.tag] = result.found

    def _take_tokens(self, deltas: scheduler_pb2.TokenDeltas) -> None:
        tokens, entries = iter(deltas.token_ids), _entries(deltas)
        of_prompts = {found.entry: found.logprobs for found in deltas.prompt_logprobs}
        assert len(of_prompts) == len(deltas.prompt_logprobs), "once per entry"
        for place, (attachment, choice, first) in enumerate(
            zip(deltas.attachments, deltas.choices, deltas.first_indices, strict=True)
        ):
            found = list(struct.iter_unpack("<IfI", of_prompts.pop(place, b"")))
            wanted = self.received[attachment].prompt_entries if choice == first == 0 else []
            assert found == wanted, "log-probabilities of the prompt"
        assert not of_prompts
        for attachment, choice, first, count in zip(
            deltas.attachments, deltas.choices, deltas.first_indices, deltas.num_tokens, strict=True
        ):
            received = self.received[attachment]
            assert received.accepted, "tokens follow the acceptance"
            assert not received.is_ended, "nothing follows the end"
            token_ids = received.choices[choice].token_ids
            run = [next(tokens) for _ in range(count)]
            for index in range(first, first + count):
                assert next(entries) == received.entries(choice, index), "log-probabilities"
            num_known = len(token_ids) - first
            assert num_known >= 0, "indices go up without a gap"
            assert num_known == 0 or received.is_redelivered, "no token is sent twice"
            assert run[:num_known] == token_ids[first : first + count], "it is what it was"
            token_ids.extend(run[num_known:])


def _entries(deltas: scheduler_pb2.TokenDeltas) -> Iterator[list[tuple[int, float, int]]]:
    """The log-probabilities of each token in the deltas."""
    if not deltas.logprobs:
        assert not deltas.num_logprobs, "no counts where there are none"
        return repeat([])
    entries = struct.iter_unpack("<IfI", deltas.logprobs)
    per_token = [
        list(islice(entries, width))
        for width, count in zip(deltas.num_logprobs, deltas.num_tokens, strict=True)
        for _ in range(count)
    ]
    assert not list(entries), "as many entries as are counted"
    return iter(per_token)


def _without_ends(submission: scheduler_pb2.Submission, received: Received) -> Received:
    """A copy without the ends, which are delivered again."""
    choices = [ReceivedChoice(list(choice.token_ids)) for choice in received.choices]
    return replace(
        received,
        submission=submission,
        choices=choices,
        accepted=False,
        opaque=b"",
        failure=None,
    )


def num_in_flight(lane: Lane) -> int:
    """Plans that were sent to its worker and have no result yet."""
    return len(lane._loop.in_flight)


@dataclass
class Member:
    """One running scheduler."""

    scheduler: Scheduler
    signals: Signals
    serving: asyncio.Task[None]
    channel: grpc.aio.Channel
    address: str

    @property
    def engine(self) -> Engine:
        term = self.term
        assert term is not None
        return term.engine

    @property
    def term(self) -> Term | None:
        """That of shard 0; None if this scheduler does not lead it."""
        shard = self.scheduler.shards.get(0)
        return None if shard is None else shard.term

    @property
    def _standby(self) -> Standby | None:
        shard = self.scheduler.shards.get(0)
        return None if shard is None else shard.standby

    @property
    def is_leading(self) -> bool:
        """Whether it leads a shard."""
        return any(shard.term is not None for shard in self.scheduler.shards.values())

    @property
    def is_standby(self) -> bool:
        """Whether it has reached Redis and does not lead."""
        standby = self._standby
        return standby is not None and standby.redis_error is None and not self.is_leading

    @property
    def watches_leader(self) -> bool:
        """Whether it has seen the leader's process lead."""
        standby = self._standby
        return standby is not None and standby._watch.is_watching

    async def kill(self) -> None:
        """Stop without a drain and without releasing the lease."""
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)

    async def drain(self) -> None:
        """Drain as on SIGTERM. Raises the error that ended the scheduler, if any."""
        self.signals.drain.set()
        await self.serving


@dataclass
class Stack:
    """Running schedulers, their workers and gateways; `member` is the scheduler in use."""

    redis_url: str
    directory: Path
    settings: dict[str, object]
    members: list[Member] = field(default_factory=list)
    workers: dict[str, tuple[CheckingWorker, grpc.aio.Server]] = field(default_factory=dict)
    gateways: list[Gateway] = field(default_factory=list)

    @property
    def member(self) -> Member:
        return self.members[-1]

    @property
    def scheduler(self) -> Scheduler:
        return self.member.scheduler

    @property
    def signals(self) -> Signals:
        return self.member.signals

    @property
    def serving(self) -> asyncio.Task[None]:
        return self.member.serving

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.member.channel

    @property
    def engine(self) -> Engine:
        return self.member.engine

    @property
    def only_lane(self) -> Lane:
        [lane] = self.engine.lanes.values()
        return lane

    def start_scheduler(self, **settings: object) -> Member:
        """Start another scheduler and use it from here on."""
        address = f"unix:{self.directory}/s{len(self.members)}.sock"
        given = {
            "listen": address,
            "redis_url": self.redis_url,
            "drain_grace_s": 5,
            "check_every_step": True,
            **self.settings,
            **settings,
        }
        signals = Signals()
        scheduler = Scheduler(SchedulerSettings.model_validate(given), signals)
        serving = asyncio.create_task(scheduler.serve())
        channel = grpc.aio.insecure_channel(address)
        member = Member(scheduler, signals, serving, channel, address)
        self.members.append(member)
        return member

    def expire_lease(self, killed: Member | None = None) -> None:
        """Expire the lease in Redis, unless another one has it than the one that was `killed`."""
        with redis.Redis.from_url(self.redis_url) as client:
            address = client.hget(KEYS.leadership, "address")
            if address is not None and (killed is None or address.decode() == killed.address):
                client.hset(KEYS.leadership, "renewed_ms", 0)

    async def start_worker(self, name: str, worker: CheckingWorker, *aliases: str) -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        for address in (name, *aliases):
            server.add_insecure_port(f"unix:{self.directory}/{address}.sock")
        await server.start()
        self.workers[name] = (worker, server)

    async def stop_worker(self, name: str) -> None:
        _, server = self.workers.pop(name)
        await server.stop(grace=None)

    async def gateway(self) -> Gateway:
        """A gateway of the scheduler in use, once it leads."""
        await until(lambda: self.member.is_leading, "a leading scheduler")
        gateway = await self.connect()
        await until(lambda: gateway.hello is not None, "the scheduler's hello")
        return gateway

    async def connect(self) -> Gateway:
        """A stream, whatever the response."""
        gateway = Gateway(self.channel)
        self.gateways.append(gateway)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await gateway.start()
        return gateway

    async def ready(self, num_workers: int = 1) -> None:
        await until(
            lambda: sum(worker.num_streams for worker, _ in self.workers.values()) >= num_workers,
            "the workers' lanes",
        )

    async def stop(self) -> None:
        """Stop each part, even if another one raises: a broken rule of a gateway's stream, or the
        error that ended the last scheduler."""
        *others, last = self.members
        async with contextlib.AsyncExitStack() as parts:
            for member in self.members:
                parts.push_async_callback(member.channel.close)
            for _, server in self.workers.values():
                parts.push_async_callback(server.stop, None)
            parts.push_async_callback(last.drain)
            for member in others:
                parts.push_async_callback(member.kill)
            for gateway in self.gateways:
                parts.push_async_callback(gateway.close)


@contextlib.asynccontextmanager
async def running_stack(
    redis_url: str, directory: Path, workers: dict[str, CheckingWorker], **settings: object
) -> AsyncIterator[Stack]:
    """A stack whose workers are named by their sockets; other `names` may start later."""
    names = settings.pop("names", tuple(workers))
    assert isinstance(names, tuple)
    settings["workers"] = ",".join(f"unix:{directory}/{name}.sock" for name in names)
    stack = Stack(redis_url, directory, settings)
    stack.start_scheduler()
    try:
        for name, worker in workers.items():
            await stack.start_worker(name, worker)
        await stack.ready(len(workers))
        yield stack
    finally:
        await stack.stop()


async def check_outputs(gateway: Gateway) -> None:
    """All tokens of all requests are those of the model, each once."""
    for received in await gateway.wait_ended():
        for index, choice in enumerate(received.choices):
            assert choice.token_ids == received.output(index)
            assert choice.end is not None
            assert choice.end.num_tokens == len(choice.token_ids)
