"""Real schedulers between ledger workers and gateways' streams, over real gRPC and Redis."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path

import grpc
import redis
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from ledger_worker import LedgerWorker, entries_at, token_at
from waiting import until

from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2_grpc
from quire.service.lifecycle import Signals
from quire.service.protocol import PROTOCOL_VERSION
from scheduler_svc.core.sequence import seed_of_choice
from scheduler_svc.engine import Engine
from scheduler_svc.lanes.lane import Lane
from scheduler_svc.server import Scheduler
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.keys import LEADERSHIP

CANCELLED, ALREADY_EXISTS, NOT_FOUND, ABORTED, INTERNAL, UNAVAILABLE = 1, 6, 5, 10, 13, 14


def info_of(error: grpc.aio.AioRpcError | scheduler_pb2.RequestFailure) -> Message:
    """The error's reason, and what it says of it."""
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error) if isinstance(error, grpc.aio.AioRpcError) else error
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details), status
    return info


def prompt(length: int, tag: int = 0) -> list[int]:
    return [tag * 100 + index % 97 for index in range(length)]


@dataclass
class HeardChoice:
    """What a gateway has heard of one choice."""

    token_ids: list[int] = field(default_factory=list)
    end: scheduler_pb2.ChoiceEnd | None = None


@dataclass
class Heard:
    """What a gateway has heard of one request, and what it asked."""

    submission: scheduler_pb2.Submission
    choices: list[HeardChoice]
    accepted: bool = False
    opaque: bytes = b""
    turn: scheduler_pb2.Turn | None = None
    failure: scheduler_pb2.RequestFailure | None = None
    # The scheduler may have lost what was heard; it is the same when it comes again.
    hears_again: bool = False

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
    def over(self) -> bool:
        return self.failure is not None or all(choice.end for choice in self.choices)

    @property
    def is_whole(self) -> bool:
        """Every choice has ended with all its tokens, and nothing else."""
        return all(
            choice.end is not None
            and choice.token_ids == self.output(index)
            and choice.end.num_tokens == len(choice.token_ids)
            for index, choice in enumerate(self.choices)
        )

    def tokens(self, count: int, choice: int = 0) -> list[int]:
        """The first tokens that a choice must have, stops left aside."""
        seed = seed_of_choice(self.seed, choice)
        first = self.num_prompt_tokens
        return [token_at(seed, position) for position in range(first, first + count)]

    def entries(self, choice: int, index: int) -> list[tuple[int, float, int]]:
        """The log-probabilities that a token must have."""
        seed, position = seed_of_choice(self.seed, choice), self.num_prompt_tokens + index
        return entries_at(seed, position, self.submission.params.num_logprobs)

    def output(self, choice: int = 0) -> list[int]:
        """All that a choice must have if nobody disturbs it."""
        tokens = self.tokens(self.max_tokens, choice)
        ends = [index for index, token in enumerate(tokens) if token in self.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens


class Gateway:
    """A gateway's end of one Connect stream. Every token must come once, in order, from the index
    on that was asked for, with its log-probabilities."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.heard: dict[int, Heard] = {}
        self.hello: scheduler_pb2.SchedulerHello | None = None
        self.epoch = 0
        # Those that bore tokens.
        self.num_token_frames = 0
        self.cancelled: dict[int, bool] = {}
        # How the stream ended, if it did.
        self.lost: grpc.aio.AioRpcError | None = None
        # Not written to the call: a write that meets the end of the stream would hide why it ended.
        self._frames: asyncio.Queue[scheduler_pb2.ConnectRequest] = asyncio.Queue()
        self._call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect(self._said())
        self._reader = asyncio.create_task(self._read())
        self._next = 1

    async def start(self) -> None:
        hello = scheduler_pb2.GatewayHello(protocol_version=PROTOCOL_VERSION)
        await self.send(hello=hello)

    async def _said(self) -> AsyncIterator[scheduler_pb2.ConnectRequest]:
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
        **fields: object,
    ) -> int:
        """`fields`: others of the submission."""
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
            ),
            **fields,
        )
        return await self._submit(Heard(submission, [HeardChoice() for _ in range(n)]))

    async def submit_again(self, heard: Heard) -> int:
        """As a gateway does whose scheduler is gone: behind what was heard before."""
        submission = scheduler_pb2.Submission()
        submission.CopyFrom(heard.submission)
        submission.again = True
        return await self._submit(_still_heard(submission, heard))

    async def attach_again(self, heard: Heard) -> int:
        """The same for a client that has been heard of elsewhere first."""
        return await self._attach(_still_heard(heard.submission, heard))

    async def _submit(self, heard: Heard) -> int:
        submission = heard.submission
        attachment = submission.attachment = self._listen(heard)
        submission.next_indices[:] = heard.next_indices
        if heard.turn is not None:
            submission.turn.CopyFrom(heard.turn)
        await self.send(submissions=[submission])
        return attachment

    async def attach(self, heard: Heard, *next_indices: int) -> int:
        """As for a client that has been heard of elsewhere, and has that many tokens."""
        choices = [
            HeardChoice(heard.output(choice)[: next_indices[choice] if next_indices else 0])
            for choice in range(len(heard.choices))
        ]
        return await self._attach(Heard(heard.submission, choices))

    async def _attach(self, heard: Heard) -> int:
        attachment = self._listen(heard)
        wanted = scheduler_pb2.Attachment(
            attachment=attachment,
            request_id=heard.submission.request_id,
            next_indices=heard.next_indices,
            turn=heard.turn,
        )
        await self.send(attachments=[wanted])
        return attachment

    def _listen(self, heard: Heard) -> int:
        attachment, self._next = self._next, self._next + 1
        self.heard[attachment] = heard
        return attachment

    async def send(self, **parts: object) -> None:
        self._frames.put_nowait(scheduler_pb2.ConnectRequest(**parts))

    async def detach(self, attachment: int, client_gone: bool) -> None:
        detachment = scheduler_pb2.Detachment(attachment=attachment, client_gone=client_gone)
        await self.send(detachments=[detachment])

    async def cancel(self, attachment: int) -> None:
        await self.send(cancellations=[scheduler_pb2.Cancellation(attachment=attachment)])

    async def over(self, *attachments: int) -> list[Heard]:
        """Waits for the ends of these requests, of all without arguments."""
        heard = [self.heard[a] for a in attachments or self.heard]
        await until(
            lambda: self.check() or all(one.over for one in heard), "the ends of all requests"
        )
        return heard

    def check(self) -> None:
        """Raises what was wrong with what was heard."""
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
            heard = self.heard[acceptance.attachment]
            heard.accepted, heard.opaque = True, acceptance.opaque
            heard.turn = acceptance.turn
        self._take_tokens(frame.deltas)
        self.num_token_frames += bool(frame.deltas.token_ids)
        for end in frame.choice_ends:
            choice = self.heard[end.attachment].choices[end.choice]
            assert choice.end is None, "a choice ends once"
            choice.end = end
        for failure in frame.failures:
            heard = self.heard[failure.attachment]
            assert heard.failure is None, "a request fails once"
            heard.failure = failure
        for result in frame.cancellation_results:
            self.cancelled[result.tag] = result.found

    def _take_tokens(self, deltas: scheduler_pb2.TokenDeltas) -> None:
        tokens, entries = iter(deltas.token_ids), _entries(deltas)
        for attachment, choice, first, count in zip(
            deltas.attachments, deltas.choices, deltas.first_indices, deltas.num_tokens, strict=True
        ):
            heard = self.heard[attachment]
            assert heard.accepted, "tokens come behind the acceptance"
            assert not heard.over, "nothing comes behind the end"
            token_ids = heard.choices[choice].token_ids
            run = [next(tokens) for _ in range(count)]
            for index in range(first, first + count):
                assert next(entries) == heard.entries(choice, index), "log-probabilities"
            num_known = len(token_ids) - first
            assert num_known >= 0, "indices go up without a gap"
            assert num_known == 0 or heard.hears_again, "no token comes twice"
            assert run[:num_known] == token_ids[first : first + count], "it is what it was"
            token_ids.extend(run[num_known:])


def _entries(deltas: scheduler_pb2.TokenDeltas) -> Iterator[list[tuple[int, float, int]]]:
    """The log-probabilities of each token."""
    if not deltas.logprobs:
        assert not deltas.num_logprobs, "no counts where there are none"
        return repeat([])
    entries = struct.iter_unpack("<IfI", deltas.logprobs)
    told = [
        list(islice(entries, width))
        for width, count in zip(deltas.num_logprobs, deltas.num_tokens, strict=True)
        for _ in range(count)
    ]
    assert not list(entries), "no more than are counted"
    return iter(told)


def _still_heard(submission: scheduler_pb2.Submission, heard: Heard) -> Heard:
    """Without the ends: they are said again."""
    choices = [HeardChoice(list(choice.token_ids)) for choice in heard.choices]
    return Heard(submission, choices, turn=heard.turn, hears_again=heard.hears_again)


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
        engine = self.scheduler._collector.engine
        assert engine is not None
        return engine

    @property
    def stands_by(self) -> bool:
        """It has asked Redis, and does not lead."""
        standby = self.scheduler._standby
        return standby is not None and standby.trouble is None and not self.scheduler.leading

    async def kill(self) -> None:
        """Without a drain, and without giving up the lead."""
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)

    async def drain(self) -> None:
        """As SIGTERM does. Raises what ended the scheduler, if anything else did."""
        self.signals.drain.set()
        await self.serving


@dataclass
class Stack:
    """Running schedulers, of which `member` is the one that is talked to, and what is around."""

    redis_url: str
    directory: Path
    settings: dict[str, object]
    members: list[Member] = field(default_factory=list)
    workers: dict[str, tuple[LedgerWorker, grpc.aio.Server]] = field(default_factory=dict)
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
        """One more, which is talked to from here on."""
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

    def lapse(self) -> None:
        """Redis' clock says that the lease is over."""
        with redis.Redis.from_url(self.redis_url) as client:
            if client.hexists(LEADERSHIP, "holder"):
                client.hset(LEADERSHIP, "renewed_ms", 0)

    async def start_worker(self, name: str, worker: LedgerWorker, *aliases: str) -> None:
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
        """Of a scheduler that leads, as soon as it does."""
        await until(lambda: self.scheduler.leading, "a leading scheduler")
        gateway = await self.connect()
        await until(lambda: gateway.hello is not None, "the scheduler's hello")
        return gateway

    async def connect(self) -> Gateway:
        """A stream, whatever is answered."""
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
        """Each part, whatever another one raises: what was wrong with what a gateway heard, or what
        ended the last scheduler, if it was not this."""
        *former, last = self.members
        async with contextlib.AsyncExitStack() as parts:
            for member in self.members:
                parts.push_async_callback(member.channel.close)
            for _, server in self.workers.values():
                parts.push_async_callback(server.stop, None)
            parts.push_async_callback(last.drain)
            for member in former:
                parts.push_async_callback(member.kill)
            for gateway in self.gateways:
                parts.push_async_callback(gateway.close)


@contextlib.asynccontextmanager
async def running_stack(
    redis_url: str, directory: Path, workers: dict[str, LedgerWorker], **settings: object
) -> AsyncIterator[Stack]:
    """Workers are named by their sockets; names without a worker may be started later."""
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
