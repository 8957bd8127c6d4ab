"""A worker behind real gRPC, and a small hand-written scheduler's side of its lane."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from host_device import HostCapturer, pipelined

from benchmarks.engines.batcher import steps
from benchmarks.engines.workload import Work
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server
from quire.service.protocol_version import PROTOCOL_VERSION
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.plans import plan_from_proto
from worker_svc.runner.device_thread import DeviceThread
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.runner import Runner
from worker_svc.runner.step_runner import LoadedRunner, StepRunner
from worker_svc.service.servicer import WorkerServicer
from worker_svc.settings import WorkerSettings

BLOCK_SIZE = 4
_DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")
# For `served_model`: on a GPU there is one way.
STEPS_QUEUE_UP = [False, True] if _DEVICE == "cpu" else [True]
# Of log-probabilities, in float32 and of logits of some tens: the shape of a batch changes the
# order of sums, and a GPU's products of queries and keys round a little more.
LOGPROBS_TOLERANCE = 5e-5 if _DEVICE == "cpu" else 3e-4


def worker_settings(model: Path, **changes: Any) -> WorkerSettings:
    """Settings of a small worker, whatever the command line says."""
    values: dict[str, Any] = {
        "model": str(model),
        "block_size": BLOCK_SIZE,
        "num_blocks": 200,
        "max_num_seqs": 40,
        "device": _DEVICE,
        "threads": 1,
        **changes,
    }
    return WorkerSettings(_cli_parse_args=[], **values)


@dataclass
class ServedWorker:
    """A worker that listens."""

    address: str
    stub: worker_pb2_grpc.WorkerServiceStub
    servicer: WorkerServicer
    loaded: LoadedRunner | None
    thread: DeviceThread


@asynccontextmanager
async def served(
    loaded: LoadedRunner | None, on_device_lost: Callable[[], object] = lambda: None
) -> AsyncIterator[ServedWorker]:
    """Serve a loaded runner, or a worker whose model is not loaded yet, on a free port."""
    thread = DeviceThread(1 + (1 if loaded is None else loaded.identity.num_stages))
    servicer = WorkerServicer(thread, on_device_lost)
    if loaded is not None:
        servicer.serve(loaded)
    server = Server(Limits(INTERNAL_MESSAGE_BYTES))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(
            address, options=channel_options(INTERNAL_MESSAGE_BYTES)
        ) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            yield ServedWorker(address, stub, servicer, loaded, thread)
    finally:
        servicer.abort_stream()
        await server.stop(5)
        assert thread.stop(wait_s=10)
        if loaded is not None:
            loaded.close()


@asynccontextmanager
async def served_model(
    model: Path, *, steps_queue_up: bool = False, **changes: Any
) -> AsyncIterator[ServedWorker]:
    """`steps_queue_up` has a worker run its steps as it does on a GPU, graphs included."""
    loaded = load_runner(worker_settings(model, **changes))
    assert isinstance(loaded.runner, MultiStepRunner)
    if steps_queue_up and isinstance(loaded.runner.runner, Runner):
        loaded = replace(loaded, runner=MultiStepRunner(pipelined(loaded, HostCapturer())))
    async with served(loaded) as worker:
        yield worker


class LaneClient:
    """One Execute stream, as a scheduler sees it."""

    def __init__(
        self,
        stub: worker_pb2_grpc.WorkerServiceStub,
        epoch: int = 1,
        holder: bytes = b"holder",
        protocol_version: int = PROTOCOL_VERSION,
        shard: int = 0,
    ) -> None:
        self.call = stub.Execute()
        self.epoch = epoch
        self._open = worker_pb2.OpenLane(
            epoch=epoch,
            holder=holder,
            protocol_version=protocol_version,
            shard=shard,
        )
        self.heartbeats: list[worker_pb2.Heartbeat] = []
        self.step = 0

    async def open(self) -> worker_pb2.Hello:
        await self.call.write(worker_pb2.ExecuteRequest(open=self._open))
        return (await self._read()).hello

    async def send(self, plan: worker_pb2.BatchPlan, step: int | None = None) -> None:
        self.step = self.step + 1 if step is None else step
        plan.epoch, plan.step = self.epoch, self.step
        await self.call.write(worker_pb2.ExecuteRequest(plan=plan))

    async def result(self) -> worker_pb2.StepResult:
        """The next result; heartbeats on the way are noted."""
        while True:
            response = await self._read()
            if response.HasField("result"):
                return response.result
            self.heartbeats.append(response.heartbeat)

    async def run(self, plan: worker_pb2.BatchPlan) -> worker_pb2.StepResult:
        await self.send(plan)
        return await self.result()

    async def _read(self) -> worker_pb2.ExecuteResponse:
        response = await self.call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(f"stream ended: {await self.call.code()}")
        return response

    async def ended(self) -> grpc.StatusCode:
        """Read on until the stream ends."""
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        return await self.call.code()


@dataclass
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0


@dataclass
class Sequence:
    """What the driver knows of one sequence."""

    row: int
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)

    def blocks_for(self, num_tokens: int, free: list[int]) -> list[int]:
        """Take the blocks that `num_tokens` need beyond those held."""
        missing = -(-num_tokens // BLOCK_SIZE) - len(self.block_ids)
        new = [free.pop() for _ in range(missing)]
        self.block_ids += new
        return new


def written_by(runner: StepRunner, work: Work, **limits: int) -> list[list[int]]:
    """The tokens of each prompt, by a minimal scheduler with these limits."""
    written: list[list[int]] = [[] for _ in work.prompts]
    for step in steps(work, **limits):
        output = runner.launch(plan_from_proto(step.plan)).output()
        for row, token in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            written[step.sampling[row]].append(token)
    return written


def admit(plan: worker_pb2.BatchPlan, sequence: Sequence) -> None:
    admissions, sampling = plan.admissions, sequence.sampling
    admissions.rows.append(sequence.row)
    admissions.token_ids.extend(sequence.tokens)
    admissions.num_tokens.append(len(sequence.tokens))
    admissions.num_prompt_tokens.append(sequence.num_prompt_tokens)
    admissions.num_computed_tokens.append(sequence.num_computed_tokens)
    admissions.block_ids.extend(sequence.block_ids)
    admissions.num_blocks.append(len(sequence.block_ids))
    admissions.temperatures.append(sampling.temperature)
    admissions.top_ks.append(sampling.top_k)
    admissions.top_ps.append(sampling.top_p)
    admissions.min_ps.append(sampling.min_p)
    admissions.seeds.append(sampling.seed)
    admissions.num_logprobs.append(sampling.num_logprobs)
    admissions.num_prompt_logprobs.append(sampling.num_prompt_logprobs)


def append(plan: worker_pb2.BatchPlan, row: int, block_ids: list[int]) -> None:
    if block_ids:
        plan.appends.rows.append(row)
        plan.appends.block_ids.extend(block_ids)
        plan.appends.num_blocks.append(len(block_ids))


def schedule(plan: worker_pb2.BatchPlan, row: int, num_tokens: int) -> None:
    plan.schedule.rows.append(row)
    plan.schedule.num_scheduled_tokens.append(num_tokens)


class Driver:
    """Runs sequences to a number of tokens: prompts in chunks, then one token per step."""

    def __init__(self, lane: LaneClient, num_blocks: int = 200, chunk: int = 7) -> None:
        self._lane = lane
        # Popped from the end: 1, 2, 3, …
        self.free = list(range(num_blocks - 1, 0, -1))
        self._chunk = chunk
        self.num_steps = 0

    async def run(self, sequences: list[Sequence], num_tokens: int) -> None:
        """Until every sequence has `num_tokens` after its prompt; then releases the rows."""
        new = list(sequences)
        while running := [s for s in sequences if _num_output(s) < num_tokens]:
            plan = worker_pb2.BatchPlan()
            for sequence in running:
                self._schedule(plan, sequence, new)
            result = await self._lane.run(plan)
            self.num_steps += 1
            assert not result.failures
            by_row = dict(zip(result.sampled_rows, result.sampled_token_ids, strict=True))
            for sequence in running:
                if sequence.row in by_row:
                    sequence.tokens.append(by_row[sequence.row])
        await self.release(sequences)

    async def release(self, sequences: list[Sequence]) -> None:
        plan = worker_pb2.BatchPlan(released_rows=[s.row for s in sequences])
        result = await self._lane.run(plan)
        assert not result.sampled_rows

    def _schedule(
        self, plan: worker_pb2.BatchPlan, sequence: Sequence, new: list[Sequence]
    ) -> None:
        scheduled = min(self._chunk, len(sequence.tokens) - sequence.num_computed_tokens)
        end = sequence.num_computed_tokens + scheduled
        blocks = sequence.blocks_for(end, self.free)
        if sequence in new:
            new.remove(sequence)
            admit(plan, sequence)
        else:
            append(plan, sequence.row, blocks)
        schedule(plan, sequence.row, scheduled)
        sequence.num_computed_tokens = end


def _num_output(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.num_prompt_tokens
