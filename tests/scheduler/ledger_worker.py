"""A simulated worker in the test's own process, with a servicer that can misbehave."""

import asyncio
from collections.abc import AsyncIterator, Callable

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.protocol import PROTOCOL_VERSION
from worker_svc.plans import plan_from_proto, result_to_proto
from worker_svc.sim.model import SimModel
from worker_svc.sim.runner import SimRunner
from worker_svc.sim.tokens import token_at as sim_token_at

VOCAB_SIZE = 50_000


def token_at(seed: int, position: int) -> int:
    """The token at an absolute position of the sequence with this seed."""
    return sim_token_at(seed, position, VOCAB_SIZE)


class LedgerWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Runs plans through the simulated worker's ledger, which raises where one breaks a rule.

    `gate` cleared holds every step back.
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
    ) -> None:
        self.hello = worker_pb2.Hello(
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=fingerprint,
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            kv_cache_dtype="float32",
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
        self.gate = asyncio.Event()
        self.gate.set()
        # Changes results on their way out.
        self.distort: Callable[[worker_pb2.StepResult], object] = lambda result: None
        self.plans: list[worker_pb2.BatchPlan] = []
        self.rows: set[int] = set()
        self.max_rows = 0
        self.num_streams = 0

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

    def check(self) -> None:
        """Nothing is left, and no rule was broken."""
        assert not self.rows
        assert not self.runner.ledger.violations

    async def Execute(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteRequest],
        context: object,
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        first = await anext(aiter(request_iterator))
        self.hello.last_finished_step = self.runner.last_finished_step
        yield worker_pb2.ExecuteResponse(hello=self.hello)
        if self.hello.incarnation in first.open.live_incarnations:
            return
        self.num_streams += 1
        self.runner.clear()
        self.rows = set()
        async for request in request_iterator:
            self.plans.append(request.plan)
            await self.gate.wait()
            yield worker_pb2.ExecuteResponse(result=self._run(request.plan))

    def _run(self, message: worker_pb2.BatchPlan) -> worker_pb2.StepResult:
        plan = plan_from_proto(message)
        result = result_to_proto(plan, self.runner.run(plan))
        self.rows -= set(message.released_rows)
        self.rows |= set(message.admissions.rows)
        self.max_rows = max(self.max_rows, len(self.rows))
        self.distort(result)
        return result
