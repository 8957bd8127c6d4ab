"""A worker without a model: its tokens are a function of (seed, position), and a ledger checks
every plan."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.protocol import PROTOCOL_VERSION


def token_at(seed: int, position: int) -> int:
    """The token that the sequence with this seed has at a position of its output."""
    return 1000 + (seed * 31 + position * 7) % 500


@dataclass
class Row:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    seed: int


@dataclass
class Ledger:
    """The worker's tables, with everything a plan must never do written as an assertion."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    rows: dict[int, Row] = field(default_factory=dict)
    # What each slot of the pool holds: the tokens up to and including its own.
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    step: int = 0
    num_plans: int = 0
    num_prefilled_tokens: int = 0
    max_rows: int = 0

    def apply(self, plan: worker_pb2.BatchPlan) -> worker_pb2.StepResult:
        assert plan.step > self.step, "steps go up"
        self.step = plan.step
        self.num_plans += 1
        for row in plan.released_rows:
            del self.rows[row]
        self._admit(plan.admissions)
        self._append(plan.appends)
        self.max_rows = max(self.max_rows, len(self.rows))
        result = worker_pb2.StepResult(epoch=plan.epoch, step=plan.step)
        scheduled = dict(zip(plan.schedule.rows, plan.schedule.num_scheduled_tokens, strict=True))
        assert len(scheduled) == len(plan.schedule.rows), "a row is scheduled once"
        written: set[int] = set()
        for row_number, num_tokens in scheduled.items():
            self._write(self.rows[row_number], num_tokens, written)
        for row_number in scheduled:
            row = self.rows[row_number]
            self._read(row)
            if row.num_computed_tokens == len(row.token_ids):
                token_id = token_at(row.seed, len(row.token_ids) - row.num_prompt_tokens)
                row.token_ids.append(token_id)
                result.sampled_rows.append(row_number)
                result.sampled_token_ids.append(token_id)
        return result

    def _admit(self, admissions: worker_pb2.Admissions) -> None:
        tokens, blocks = iter(admissions.token_ids), iter(admissions.block_ids)
        for index, row in enumerate(admissions.rows):
            assert row not in self.rows, "a row is admitted once"
            assert row < self.max_num_seqs
            self.rows[row] = Row(
                token_ids=[next(tokens) for _ in range(admissions.num_tokens[index])],
                num_prompt_tokens=admissions.num_prompt_tokens[index],
                num_computed_tokens=admissions.num_computed_tokens[index],
                block_ids=[next(blocks) for _ in range(admissions.num_blocks[index])],
                seed=admissions.seeds[index],
            )
            self._check_blocks(self.rows[row].block_ids)

    def _append(self, appends: worker_pb2.BlockAppends) -> None:
        blocks = iter(appends.block_ids)
        for row, num_blocks in zip(appends.rows, appends.num_blocks, strict=True):
            self.rows[row].block_ids.extend(next(blocks) for _ in range(num_blocks))
            self._check_blocks(self.rows[row].block_ids)

    def _check_blocks(self, block_ids: list[int]) -> None:
        assert all(0 < block_id < self.num_blocks for block_id in block_ids), "block 0 is null"
        assert len(set(block_ids)) == len(block_ids)

    def _write(self, row: Row, num_tokens: int, written: set[int]) -> None:
        end = row.num_computed_tokens + num_tokens
        assert 0 < num_tokens <= len(row.token_ids) - row.num_computed_tokens
        for position in range(row.num_computed_tokens, end):
            slot = self._slot(row, position)
            assert slot not in written, "no two rows write one slot"
            written.add(slot)
            self.slots[slot] = tuple(row.token_ids[: position + 1])
        self.num_prefilled_tokens += num_tokens if row.num_computed_tokens == 0 else num_tokens - 1
        row.num_computed_tokens = end

    def _read(self, row: Row) -> None:
        for position in range(row.num_computed_tokens):
            held = self.slots[self._slot(row, position)]
            assert held == tuple(row.token_ids[: position + 1]), "a slot holds another prefix"

    def _slot(self, row: Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size


class LedgerWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Runs plans through a ledger. `gate` cleared holds every step back."""

    def __init__(
        self,
        incarnation: int,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        fingerprint: bytes = b"model",
    ) -> None:
        self.hello = worker_pb2.Hello(
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=fingerprint,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_dtype="float32",
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=32,
        )
        self.ledger = Ledger(block_size, num_blocks, max_num_seqs)
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing_seeds: set[int] = set()
        # Changes results on their way out.
        self.distort: Callable[[worker_pb2.StepResult], object] = lambda result: None
        self.num_streams = 0
        self.num_received_plans = 0

    async def Execute(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteRequest],
        context: object,
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        first = await anext(aiter(request_iterator))
        yield worker_pb2.ExecuteResponse(hello=self.hello)
        if self.hello.incarnation in first.open.live_incarnations:
            return
        self.num_streams += 1
        hello = self.hello
        self.ledger = Ledger(hello.block_size, hello.num_blocks, hello.max_num_seqs)
        async for request in request_iterator:
            self.num_received_plans += 1
            await self.gate.wait()
            yield worker_pb2.ExecuteResponse(result=self._run(request.plan))

    def _run(self, plan: worker_pb2.BatchPlan) -> worker_pb2.StepResult:
        result = self.ledger.apply(plan)
        for row in list(result.sampled_rows):
            if self.ledger.rows[row].seed in self.failing_seeds:
                index = list(result.sampled_rows).index(row)
                del result.sampled_rows[index], result.sampled_token_ids[index]
                result.failures.add(row=row, reason="the logits are not finite")
        self.distort(result)
        return result
