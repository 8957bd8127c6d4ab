"""A simulated worker in the test's process, whose servicer can misbehave."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
from faulty_sim_runner import FaultySimRunner
from grpc import StatusCode
from sim_tokens import token_at as sim_token_at
from waiting import until

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.protocol_version import PROTOCOL_VERSION
from worker_svc.plan.plans import PlanError, plan_from_proto, result_to_proto
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.sim.runner import SimModel
from worker_svc.sim.sampling import logprobs_at

VOCAB_SIZE = 50_000
HEARTBEAT_S = 1.0

_Context = grpc.aio.ServicerContext[Any, Any]


def token_at(seed: int, position: int) -> int:
    """The token at an absolute position of the sequence with this seed."""
    return sim_token_at(seed, position, VOCAB_SIZE)


def entries_at(
    seed: int, position: int, num_logprobs: int, token_id: int | None = None
) -> list[tuple[int, float, int]]:
    """Token ids, log-probabilities and ranks of the token at a position; it is the sampled one if
    not given."""
    if not num_logprobs:
        return []
    token_ids, logprobs, ranks = logprobs_at(
        np.array([seed], np.uint64),
        np.array([position]),
        np.array([token_at(seed, position) if token_id is None else token_id]),
        num_logprobs - 1,
        VOCAB_SIZE,
    )
    return list(zip(token_ids[0].tolist(), logprobs[0].tolist(), ranks[0].tolist(), strict=True))


class Broken(Exception):
    """Raised by a hook: the worker breaks its stream."""


class CheckingStream:
    """The worker's side of one `Execute` stream. It ends at a `None` in `responses`."""

    def __init__(self) -> None:
        self.plans: asyncio.Queue[worker_pb2.BatchPlan | None] = asyncio.Queue()
        self.responses: asyncio.Queue[worker_pb2.ExecuteResponse | None] = asyncio.Queue()
        # By step, the rows of plans without a result.
        self.in_flight: dict[int, set[int]] = {}

    def send(self, **message: Any) -> None:
        self.responses.put_nowait(worker_pb2.ExecuteResponse(**message))

    def end(self) -> None:
        self.responses.put_nowait(None)

    @property
    def received(self) -> list[worker_pb2.BatchPlan]:
        """Plans that have not started."""
        plans = [self.plans.get_nowait() for _ in range(self.plans.qsize())]
        for plan in plans:
            self.plans.put_nowait(plan)
        return [plan for plan in plans if plan is not None]

    def drop_plans(self) -> None:
        """Drop the plans that have not started."""
        while not self.plans.empty():
            self.plans.get_nowait()


class CheckingWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Runs plans through the simulated worker's KV checker, which raises if one breaks a rule.

    A cleared `gate` holds every step back; a cleared `awake` suspends the whole process. A plan
    with a row whose seed is in `poison` breaks the stream instead of running.
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
        longest_jump: int = 0,
        num_holds: int = 0,
        num_speculative_tokens: int = 0,
        acceptance_rate: float = 0.7,
        token_logprobs: bool = False,
        num_stages: int = 1,
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
            num_speculative_tokens=num_speculative_tokens,
            num_stages=num_stages,
        )
        self.runner = FaultySimRunner(
            SimModel(
                vocab_size=VOCAB_SIZE,
                max_model_len=max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                longest_jump=longest_jump,
                num_speculative_tokens=num_speculative_tokens,
                acceptance_rate=acceptance_rate,
            ),
            num_holds=num_holds,
            token_logprobs=token_logprobs,
        )
        self.gate, self.awake = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.awake.set()
        # Clears the gate when this many tokens are sampled, once.
        self.hold_after: float = math.inf
        self.poison: set[int] = set()
        # Plans with such a row.
        self.num_poisoned = 0
        # Changes results before they are sent; raises Broken to lose the result of a step.
        self.distort: Callable[[worker_pb2.StepResult], object] = lambda result: None
        self.violations: list[str] = []
        self.plans: list[worker_pb2.BatchPlan] = []
        # Seeds of the rows in use.
        self.seeds: dict[int, int] = {}
        self.max_rows = 0
        self.num_streams = 0
        self.num_sampled_tokens = 0
        # By shard.
        self._fences: dict[int, tuple[int, bytes]] = {}
        # That of the newest stream; None before the first one.
        self._shard: int | None = None
        self._is_open = False
        self._stream: CheckingStream | None = None
        # Held while a step runs.
        self._device = asyncio.Lock()

    @property
    def rows(self) -> set[int]:
        return set(self.seeds)

    @property
    def rows_in_flight(self) -> list[set[int]]:
        """Those of each plan without a result."""
        return [] if self._stream is None else [*self._stream.in_flight.values()]

    @property
    def received(self) -> list[worker_pb2.BatchPlan]:
        """Plans that have not started."""
        return [] if self._stream is None else self._stream.received

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
        """Assert that no row is in use and no rule was broken."""
        violations = [*self.runner.kv_checker.violations, *self.violations]
        assert not violations, [str(violation) for violation in violations]
        await until(lambda: not self.rows, "the release of all rows")

    def drain(self) -> None:
        """Ask the scheduler to drain the lane."""
        self.hello.draining = True
        if self._stream is not None:
            self._send_heartbeat(self._stream)

    def stop_draining(self) -> None:
        """Take requests again, on the next stream."""
        self.hello.draining = False

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
        await self._raise_fence(opening, context)
        if self._stream is not None:
            self._stream.drop_plans()
            self._stream.end()
        # After the step that runs.
        async with self._device:
            await self._raise_fence(opening, context)
            stream = self._open(opening.shard)
        yield worker_pb2.ExecuteResponse(hello=self.hello)
        tasks = [
            asyncio.create_task(self._read(requests, stream)),
            asyncio.create_task(self._send_heartbeats(stream)),
        ]
        self._running = asyncio.create_task(self._run_plans(stream))
        try:
            while (response := await stream.responses.get()) is not None:
                yield response
        finally:
            if self._stream is stream:
                self._is_open = False
            if self.awake.is_set():
                stream.drop_plans()
            # A suspended process does not notice the end; it continues when it is resumed.
            stream.plans.put_nowait(None)
            for task in tasks:
                task.cancel()
        if self._stream is not stream:
            await context.abort(StatusCode.ABORTED, "a newer stream has taken this worker")
        await context.abort(StatusCode.UNAVAILABLE, "the worker has broken the stream")

    async def _raise_fence(self, opening: worker_pb2.OpenLane, context: _Context) -> None:
        if self._is_open and opening.shard != self._shard:
            await context.abort(StatusCode.UNAVAILABLE, f"shard {self._shard} has this worker")
        epoch, holder = self._fences.get(opening.shard, (0, b""))
        if opening.epoch < epoch or (opening.epoch == epoch and opening.holder != holder):
            await context.abort(StatusCode.FAILED_PRECONDITION, f"epoch {opening.epoch} is over")
        self._fences[opening.shard] = opening.epoch, opening.holder

    def _open(self, shard: int) -> CheckingStream:
        """Start a stream with all rows free. The shard before keeps another incarnation."""
        if self._shard not in (None, shard):
            self.hello.incarnation += 2**32
        self._shard, self._is_open = shard, True
        self._stream = stream = CheckingStream()
        self.num_streams += 1
        self.runner.clear()
        self.seeds = {}
        self.hello.last_finished_step = self.runner.last_finished_step
        return stream

    async def _read(
        self, requests: AsyncIterator[worker_pb2.ExecuteRequest], stream: CheckingStream
    ) -> None:
        async for request in requests:
            if request.plan.schedule.rows:
                self._add_in_flight(stream, request.plan)
            stream.plans.put_nowait(request.plan)
        stream.end()

    def _add_in_flight(self, stream: CheckingStream, plan: worker_pb2.BatchPlan) -> None:
        """Several stages run plans of different rows."""
        rows = {*plan.schedule.rows}
        if self.hello.num_stages > 1:
            shared = [step for step, others in stream.in_flight.items() if rows & others]
            if shared:
                self.violations.append(f"step {plan.step} runs rows of {shared}, in flight")
        stream.in_flight[plan.step] = rows

    async def _send_heartbeats(self, stream: CheckingStream) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.awake.wait()
            self._send_heartbeat(stream)

    def _send_heartbeat(self, stream: CheckingStream) -> None:
        stream.send(
            heartbeat=worker_pb2.Heartbeat(
                last_finished_step=self.runner.last_finished_step, draining=self.hello.draining
            )
        )

    async def _run_plans(self, stream: CheckingStream) -> None:
        while (plan := await stream.plans.get()) is not None:
            async with self._device:
                self.plans.append(plan)
                await self.gate.wait()
                await self.awake.wait()
                if stream is not self._stream:
                    return
                try:
                    result = self._run(plan)
                    stream.in_flight.pop(plan.step, None)
                    stream.send(result=result)
                except (Broken, PlanError):
                    stream.end()
                    return

    def _run(self, message: worker_pb2.BatchPlan) -> worker_pb2.StepResult:
        for row in message.released_rows:
            del self.seeds[row]
        self.seeds.update(zip(message.admissions.rows, message.admissions.seeds, strict=True))
        self.max_rows = max(self.max_rows, len(self.seeds))
        if not self.poison.isdisjoint(self.seeds[row] for row in message.schedule.rows):
            self.num_poisoned += 1
            raise Broken
        plan = plan_from_proto(message)
        result = result_to_proto(plan, MultiStepRunner(self.runner).launch(plan).output())
        self.num_sampled_tokens += len(result.sampled_rows)
        if self.num_sampled_tokens >= self.hold_after:
            self.hold_after = math.inf
            self.gate.clear()
        self.distort(result)
        return result


def rounds_of(worker: CheckingWorker) -> list[int]:
    """The maximum number of rounds of each plan that ran rows."""
    schedules = [plan.schedule for plan in worker.plans if plan.schedule.rows]
    return [max(schedule.num_rounds, default=1) for schedule in schedules]
