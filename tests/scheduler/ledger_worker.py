"""A simulated worker in the test's own process, with a servicer that can misbehave."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
from grpc import StatusCode
from waiting import until

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.protocol import PROTOCOL_VERSION
from worker_svc.plans import PlanError, plan_from_proto, result_to_proto
from worker_svc.rounds import RoundsRunner
from worker_svc.sim.logprobs import logprobs_at
from worker_svc.sim.model import SimModel
from worker_svc.sim.runner import SimRunner
from worker_svc.sim.tokens import token_at as sim_token_at

VOCAB_SIZE = 50_000
BEAT_S = 1.0

_Context = grpc.aio.ServicerContext[Any, Any]


def token_at(seed: int, position: int) -> int:
    """The token at an absolute position of the sequence with this seed."""
    return sim_token_at(seed, position, VOCAB_SIZE)


def entries_at(seed: int, position: int, num_logprobs: int) -> list[tuple[int, float, int]]:
    """Token ids, log-probabilities and ranks that come with that token."""
    if not num_logprobs:
        return []
    token_ids, logprobs, ranks = logprobs_at(
        np.array([seed], np.uint64),
        np.array([position]),
        np.array([token_at(seed, position)]),
        num_logprobs - 1,
        VOCAB_SIZE,
    )
    return list(zip(token_ids[0].tolist(), logprobs[0].tolist(), ranks[0].tolist(), strict=True))


class Broken(Exception):
    """Raised by a hook: the worker breaks its stream."""


class LedgerStream:
    """One `Execute` stream, from the worker's side. It ends when `None` is to be said."""

    def __init__(self) -> None:
        self.plans: asyncio.Queue[worker_pb2.BatchPlan | None] = asyncio.Queue()
        self.responses: asyncio.Queue[worker_pb2.ExecuteResponse | None] = asyncio.Queue()

    def say(self, **message: Any) -> None:
        self.responses.put_nowait(worker_pb2.ExecuteResponse(**message))

    def end(self) -> None:
        self.responses.put_nowait(None)

    def drop_plans(self) -> None:
        """Those that nobody has begun."""
        while not self.plans.empty():
            self.plans.get_nowait()


class LedgerWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Runs plans through the simulated worker's ledger, which raises where one breaks a rule.

    `gate` cleared holds every step back; `awake` cleared stops the whole process. A plan with a
    row whose seed is in `poison` breaks the stream instead of being run.
    """

    def __init__(
        self,
        incarnation: int,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        fingerprint: bytes = b"model",
        num_host_blocks: int = 0,
        max_num_batched_tokens: int = 32,
        kv_cache_dtype: str = "float32",
    ) -> None:
        self.hello = worker_pb2.Hello(
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=fingerprint,
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.runner = SimRunner(
            SimModel(
                vocab_size=VOCAB_SIZE,
                max_model_len=max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
            )
        )
        self.gate, self.awake = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.awake.set()
        self.poison: set[int] = set()
        # Changes results on their way out; Broken: the step was run, its result is lost.
        self.distort: Callable[[worker_pb2.StepResult], object] = lambda result: None
        self.plans: list[worker_pb2.BatchPlan] = []
        # Seeds of held rows.
        self.seeds: dict[int, int] = {}
        self.max_rows = 0
        self.num_streams = 0
        self.num_refused_streams = 0
        self.num_sampled_tokens = 0
        self._fence = (0, b"")
        self._stream: LedgerStream | None = None
        # Held while a step runs.
        self._device = asyncio.Lock()

    @property
    def rows(self) -> set[int]:
        return set(self.seeds)

    @property
    def is_held_back(self) -> bool:
        """A step waits for the gate."""
        return self._device.locked() and not self.gate.is_set()

    @property
    def failing_seeds(self) -> set[int]:
        return self.runner.failing_seeds

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(sum(plan.schedule.num_scheduled_tokens) for plan in self.plans)

    @property
    def num_prefilled_tokens(self) -> int:
        return sum(
            count
            for plan in self.plans
            for count in plan.schedule.num_scheduled_tokens
            if count > 1
        )

    @property
    def num_swapped_blocks(self) -> int:
        return sum(len(plan.swap_outs.sources) for plan in self.plans)

    async def check(self) -> None:
        """Nothing is left, and no rule was broken."""
        assert not self.runner.ledger.violations
        await until(lambda: not self.rows, "the release of all rows")

    def drain(self) -> None:
        """The worker asks for its lane to be drained."""
        self.hello.draining = True
        if self._stream is not None:
            self._beat(self._stream)

    async def Identify(  # noqa: N802
        self, request: worker_pb2.IdentifyRequest, context: _Context
    ) -> worker_pb2.IdentifyResponse:
        await self.awake.wait()
        return worker_pb2.IdentifyResponse(incarnation=self.hello.incarnation)

    async def Execute(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteRequest],
        context: _Context,
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            return
        opening = first.open
        await self.awake.wait()
        await self._raise_fence((opening.epoch, opening.holder), context)
        if self._stream is not None:
            self._stream.drop_plans()
            self._stream.end()
        # Behind the step that runs.
        async with self._device:
            stream = self._open()
        yield worker_pb2.ExecuteResponse(hello=self.hello)
        tasks = [
            asyncio.create_task(self._read(requests, stream)),
            asyncio.create_task(self._keep_beating(stream)),
        ]
        self._running = asyncio.create_task(self._run_plans(stream))
        try:
            while (response := await stream.responses.get()) is not None:
                yield response
        finally:
            if self.awake.is_set():
                stream.drop_plans()
            # A process that is stopped does not hear of the end: it goes on when it wakes up.
            stream.plans.put_nowait(None)
            for task in tasks:
                task.cancel()
        await context.abort(StatusCode.UNAVAILABLE, "the worker has broken the stream")

    async def _raise_fence(self, fence: tuple[int, bytes], context: _Context) -> None:
        epoch, holder = fence
        if epoch < self._fence[0] or (epoch == self._fence[0] and holder != self._fence[1]):
            self.num_refused_streams += 1
            await context.abort(StatusCode.FAILED_PRECONDITION, f"epoch {epoch} is over")
        self._fence = fence

    def _open(self) -> LedgerStream:
        """All rows are free."""
        self._stream = stream = LedgerStream()
        self.num_streams += 1
        self.runner.clear()
        self.seeds = {}
        self.hello.last_finished_step = self.runner.last_finished_step
        return stream

    async def _read(
        self, requests: AsyncIterator[worker_pb2.ExecuteRequest], stream: LedgerStream
    ) -> None:
        async for request in requests:
            stream.plans.put_nowait(request.plan)
        stream.end()

    async def _keep_beating(self, stream: LedgerStream) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self.awake.wait()
            self._beat(stream)

    def _beat(self, stream: LedgerStream) -> None:
        stream.say(
            heartbeat=worker_pb2.Heartbeat(
                last_finished_step=self.runner.last_finished_step, draining=self.hello.draining
            )
        )

    async def _run_plans(self, stream: LedgerStream) -> None:
        while (plan := await stream.plans.get()) is not None:
            async with self._device:
                self.plans.append(plan)
                await self.gate.wait()
                await self.awake.wait()
                if stream is not self._stream:
                    return
                try:
                    stream.say(result=self._run(plan))
                except (Broken, PlanError):
                    stream.end()
                    return

    def _run(self, message: worker_pb2.BatchPlan) -> worker_pb2.StepResult:
        for row in message.released_rows:
            del self.seeds[row]
        self.seeds.update(zip(message.admissions.rows, message.admissions.seeds, strict=True))
        self.max_rows = max(self.max_rows, len(self.seeds))
        if not self.poison.isdisjoint(self.seeds[row] for row in message.schedule.rows):
            raise Broken
        plan = plan_from_proto(message)
        result = result_to_proto(plan, RoundsRunner(self.runner).run(plan))
        self.num_sampled_tokens += len(result.sampled_rows)
        self.distort(result)
        return result
