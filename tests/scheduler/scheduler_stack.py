"""A real scheduler between ledger workers and a gateway's stream, over real gRPC and Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from ledger_worker import LedgerWorker, token_at
from waiting import until

from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2_grpc
from quire.service.lifecycle import Signals
from quire.service.protocol import PROTOCOL_VERSION
from scheduler_svc.core.sequence import seed_of_choice
from scheduler_svc.server import Scheduler
from scheduler_svc.settings import SchedulerSettings


@dataclass
class HeardChoice:
    """What a gateway has heard of one choice."""

    token_ids: list[int] = field(default_factory=list)
    end: scheduler_pb2.ChoiceEnd | None = None


@dataclass
class Heard:
    """What a gateway has heard of one request, and what it asked."""

    seed: int
    num_prompt_tokens: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    choices: list[HeardChoice]
    accepted: bool = False
    failure: scheduler_pb2.RequestFailure | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def end(self) -> scheduler_pb2.ChoiceEnd | None:
        return self.choices[0].end

    @property
    def over(self) -> bool:
        return self.failure is not None or all(choice.end for choice in self.choices)

    def tokens(self, count: int, choice: int = 0) -> list[int]:
        """The first tokens that a choice must have, stops left aside."""
        seed = seed_of_choice(self.seed, choice)
        first = self.num_prompt_tokens
        return [token_at(seed, position) for position in range(first, first + count)]

    def output(self, choice: int = 0) -> list[int]:
        """All that a choice must have if nobody disturbs it."""
        tokens = self.tokens(self.max_tokens, choice)
        ends = [index for index, token in enumerate(tokens) if token in self.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens


class Gateway:
    """A gateway's end of the Connect stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.heard: dict[int, Heard] = {}
        self.hello: scheduler_pb2.SchedulerHello | None = None
        self.cancelled: dict[int, bool] = {}
        self._call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect()
        self._reader = asyncio.create_task(self._read())
        self._next = 1

    async def start(self) -> None:
        hello = scheduler_pb2.GatewayHello(gateway_id=b"test", protocol_version=PROTOCOL_VERSION)
        await self._call.write(scheduler_pb2.ConnectRequest(hello=hello))

    async def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        seed: int = 1,
        request_id: str | None = None,
        stop_token_ids: tuple[int, ...] = (),
        n: int = 1,
        priority: int = 0,
    ) -> int:
        attachment, self._next = self._next, self._next + 1
        self.heard[attachment] = Heard(
            seed, len(prompt), max_tokens, stop_token_ids, [HeardChoice() for _ in range(n)]
        )
        submission = scheduler_pb2.Submission(
            attachment=attachment,
            request_id=request_id or f"request-{attachment}",
            prompt_token_ids=prompt,
            n=n,
            priority=priority,
            params=scheduler_pb2.ResolvedParams(
                top_p=1, seed=seed, max_tokens=max_tokens, stop_token_ids=stop_token_ids
            ),
        )
        await self._call.write(scheduler_pb2.ConnectRequest(submissions=[submission]))
        return attachment

    async def send(self, **parts: object) -> None:
        await self._call.write(scheduler_pb2.ConnectRequest(**parts))

    async def over(self, *attachments: int) -> list[Heard]:
        """Waits for the ends of these requests, of all without arguments."""
        heard = [self.heard[a] for a in attachments or self.heard]
        await until(lambda: all(one.over for one in heard), "the ends of all requests")
        return heard

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for frame in self._call:
            if frame.HasField("hello"):
                self.hello = frame.hello
            for acceptance in frame.acceptances:
                self.heard[acceptance.attachment].accepted = True
            self._take(frame.deltas)
            for end in frame.choice_ends:
                choice = self.heard[end.attachment].choices[end.choice]
                assert choice.end is None, "a choice ends once"
                choice.end = end
            for failure in frame.failures:
                self.heard[failure.attachment].failure = failure
            for result in frame.cancellation_results:
                self.cancelled[result.tag] = result.found

    def _take(self, deltas: scheduler_pb2.TokenDeltas) -> None:
        tokens = iter(deltas.token_ids)
        for attachment, choice, first, count in zip(
            deltas.attachments, deltas.choices, deltas.first_indices, deltas.num_tokens, strict=True
        ):
            heard = self.heard[attachment].choices[choice]
            assert first == len(heard.token_ids), "indices go up without a gap"
            heard.token_ids.extend(next(tokens) for _ in range(count))


@dataclass
class Stack:
    """A running scheduler and what is around it."""

    scheduler: Scheduler
    signals: Signals
    serving: asyncio.Task[None]
    channel: grpc.aio.Channel
    directory: Path
    workers: dict[str, tuple[LedgerWorker, grpc.aio.Server]] = field(default_factory=dict)
    gateways: list[Gateway] = field(default_factory=list)

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
        await until(lambda: self.scheduler.leading, "a leading scheduler")
        gateway = Gateway(self.channel)
        self.gateways.append(gateway)
        await gateway.start()
        await until(lambda: gateway.hello is not None, "the scheduler's hello")
        return gateway

    async def ready(self, num_workers: int = 1) -> None:
        await until(
            lambda: sum(worker.num_streams for worker, _ in self.workers.values()) >= num_workers,
            "the workers' lanes",
        )


@contextlib.asynccontextmanager
async def running_stack(
    redis_url: str, directory: Path, workers: dict[str, LedgerWorker], **settings: object
) -> AsyncIterator[Stack]:
    """Workers are named by their sockets; names without a worker may be started later."""
    names = settings.pop("names", tuple(workers))
    assert isinstance(names, tuple)
    signals = Signals()
    scheduler = Scheduler(
        SchedulerSettings.model_validate(
            {
                "listen": f"unix:{directory}/scheduler.sock",
                "redis_url": redis_url,
                "workers": ",".join(f"unix:{directory}/{name}.sock" for name in names),
                "drain_grace_s": 5,
                "check_every_step": True,
                **settings,
            }
        ),
        signals,
    )
    channel = grpc.aio.insecure_channel(f"unix:{directory}/scheduler.sock")
    stack = Stack(scheduler, signals, asyncio.create_task(scheduler.serve()), channel, directory)
    try:
        for name, worker in workers.items():
            await stack.start_worker(name, worker)
        await stack.ready(len(workers))
        yield stack
    finally:
        for gateway in stack.gateways:
            await gateway.close()
        signals.drain.set()
        try:
            await stack.serving
        finally:
            for _, server in stack.workers.values():
                await server.stop(grace=None)
            await channel.close()
