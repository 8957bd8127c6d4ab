"""A simulated worker: its tokens, its time, its service, its process."""

import asyncio
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from faulty_sim_runner import FaultySimRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sim_driver import SMALL, SimDriver
from sim_tokens import token_at
from worker_driver import Driver, LaneClient, Sampling, Sequence, admit, schedule, served

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from worker_svc.plan.plans import StepTimes, plan_from_proto, result_to_proto
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.settings import WorkerSettings
from worker_svc.sim.recorded_tokens import RecordedStep, rounds_of
from worker_svc.sim.runner import SimModel, SimRunner
from worker_svc.sim.runner_loading import loaded_runner, sim_model
from worker_svc.sim.sampling import logprobs_at, tokens_at

# Runs the worker as `python -m` does, and writes down at its end what it has loaded.
_RUNNER = """
import atexit, json, pathlib, runpy, sys
modules = sys.argv[1]
sys.argv = ["worker_svc", *sys.argv[2:]]
atexit.register(lambda: pathlib.Path(modules).write_text(json.dumps(sorted(sys.modules))))
runpy.run_module("worker_svc", run_name="__main__", alter_sys=True)
"""


def test_tokens_are_those_of_splitmix64() -> None:
    # The generator's published outputs for seed 1234567.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [token_at(1234567, i, 2**64) for i in range(3)] == outputs


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_many_tokens_at_once_are_the_same(seed: int) -> None:
    positions = np.arange(50)
    seeds = np.full(50, seed, np.uint64)
    expected = [token_at(seed, i, 1000) for i in range(50)]
    assert tokens_at(seeds, positions, 1000).tolist() == expected
    assert len(set(expected)) > 40


def test_a_step_lasts_as_long_as_the_model_computes() -> None:
    model = SimModel(step_ms=20, token_us=1000, context_ns=100_000)
    worker = SimDriver(model)
    started = time.monotonic_ns()
    times = worker.run(admissions=[(0, [1] * 40, 0, [1, 2, 3])], scheduled=[(0, 40)]).times
    # 20 ms, 40 tokens of 1 ms, 40 tokens of context of 0.1 ms.
    assert 64e6 <= times.preparing_ns + times.forward_ns <= time.monotonic_ns() - started
    assert worker.run(release=[0]).sampled_rows == []


def test_a_failing_seed_fails_its_row_alone() -> None:
    worker = SimDriver()
    worker.runner.failing_seeds.add(7)
    worker.run(admissions=[(0, [1, 2], 0, [1])], scheduled=[(0, 2)], seed=1)
    output = worker.run(admissions=[(1, [1, 2], 0, [2])], scheduled=[(0, 1), (1, 2)], seed=7)
    assert output.sampled_rows == [0]
    assert "finite" in output.failures[1].message
    # A plan that was already on its way schedules the row once more.
    again = worker.run(scheduled=[(0, 1), (1, 1)])
    assert (again.sampled_rows, list(again.failures)) == ([0], [1])


def test_recorded_steps_sample_and_fail_as_they_did() -> None:
    runner = SimRunner(SMALL, {1: [RecordedStep({0: 555})]})
    plan = worker_pb2.BatchPlan(epoch=1, step=1)
    for row in (0, 1):
        admit(plan, Sequence(row, [1, 2], 2, block_ids=[row + 1]))
        schedule(plan, row, 2)
    output = runner.run(plan_from_proto(plan))
    assert (output.sampled_rows, output.sampled_token_ids) == ([0], [555])
    assert list(output.failures) == [1]


@pytest.mark.parametrize("num_holds", [0, 1, 2])
def test_a_recorded_jump_is_made_again(num_holds: int) -> None:
    """A jump of two tokens in the first round, and one in the second of two rounds; or a wait in
    place of the first ones."""
    model = replace(SMALL, block_size=16, max_model_len=64, longest_jump=3)
    message = worker_pb2.BatchPlan(epoch=1, step=1)
    admit(message, Sequence(0, [1, 2], 2, block_ids=[1], sampling=Sampling(seed=6)))
    schedule(message, 0, 2)
    message.schedule.num_lookahead_tokens[:] = [4]
    rounds = worker_pb2.BatchPlan(epoch=1, step=2)
    schedule(rounds, 0, 1)
    rounds.schedule.num_rounds[:] = [2]
    rounds.schedule.num_lookahead_tokens[:] = [4]
    plans = [plan_from_proto(message), plan_from_proto(rounds)]

    def results(runner: SimRunner) -> list[worker_pb2.StepResult]:
        outputs = [MultiStepRunner(runner).launch(plan).output() for plan in plans]
        untimed = [replace(output, times=StepTimes()) for output in outputs]
        return [result_to_proto(*pair) for pair in zip(plans, untimed, strict=True)]

    first = results(FaultySimRunner(model, num_holds=num_holds))
    assert any(len(result.forced_indices) for result in first)
    assert first[0].num_computed_tokens == [1 if num_holds else 2]
    assert bool(first[0].sampled_rows) == (num_holds == 0)
    steps = {result.step: list(rounds_of(result)) for result in first}
    assert results(SimRunner(model, steps)) == first


def test_logprobs_are_a_function_of_seed_and_position() -> None:
    tokens = [1, 2, 3, 4, 5]
    one = SimDriver().run(
        admissions=[(0, tokens, 0, [1, 2])], scheduled=[(0, 5)], seed=9, num_logprobs=6
    )
    # Elsewhere, continued in the middle of a batch where the row before it asks for less.
    other = SimDriver()
    other.run(admissions=[(3, tokens, 0, [3, 4])], scheduled=[(3, 5)], seed=5, num_logprobs=2)
    both = other.run(
        admissions=[(1, tokens, 0, [1, 2])],
        scheduled=[(3, 1), (1, 5)],
        seed=9,
        num_logprobs=6,
    )
    assert one.logprobs is not None
    assert both.logprobs is not None
    assert both.logprobs.num_entries.tolist() == [2, 6]
    for name in ("token_ids", "logprobs", "ranks"):
        assert getattr(both.logprobs, name)[2:].tolist() == getattr(one.logprobs, name).tolist()


@pytest.mark.parametrize("vocab_size", [1, 3, 1000])
def test_simulated_logprobs_are_ranked(vocab_size: int) -> None:
    seeds, positions = np.arange(50, dtype=np.uint64), np.arange(50)
    tokens = tokens_at(seeds, positions, vocab_size)
    ids, logprobs, ranks = logprobs_at(seeds, positions, tokens, 5, vocab_size)
    assert ids[:, 0].tolist() == tokens.tolist()
    assert set(ranks[:, 0].tolist()) == set(range(1, 1 + min(4, vocab_size)))
    for i in range(50):
        by_rank = dict(zip(ranks[i], zip(ids[i], logprobs[i], strict=True), strict=True))
        top = [by_rank[rank] for rank in range(1, 1 + min(5, vocab_size))]
        assert len({token for token, _ in top}) == len(top)
        assert [value for _, value in top] == sorted((v for _, v in top), reverse=True)
        assert by_rank[ranks[i, 0]] == (tokens[i], logprobs[i, 0])
    assert len(set(logprobs[:, 0].tolist())) > 40


def test_an_empty_plan_gives_an_empty_result() -> None:
    output = SimDriver().run()
    assert (output.sampled_rows, output.failures, output.logprobs) == ([], {}, None)


async def test_serves_a_lane_like_any_worker() -> None:
    model = SimModel(
        vocab_size=1000, max_model_len=96, block_size=4, num_blocks=200, num_host_blocks=9
    )
    runner = SimRunner(model)
    async with served(loaded_runner(runner)) as worker:
        lane = LaneClient(worker.stub)
        hello = await lane.open()
        assert (hello.num_blocks, hello.num_host_blocks, hello.block_size) == (200, 9, 4)
        sequences = [Sequence(row, [row] * 11, 11, sampling=Sampling(seed=row)) for row in range(4)]
        await Driver(lane).run(sequences, 20)
        for row, sequence in enumerate(sequences):
            assert sequence.tokens[11:] == [token_at(row, i, 1000) for i in range(11, 31)]
        assert runner.kv_checker.violations == []


async def test_a_violation_ends_the_stream_and_the_next_one_works() -> None:
    runner = SimRunner(SMALL)
    async with served(loaded_runner(runner)) as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        plan = worker_pb2.BatchPlan()
        admit(plan, Sequence(2, [1, 2], 2, block_ids=[0]))
        schedule(plan, 2, 2)
        await lane.send(plan)
        assert await lane.ended() == grpc.StatusCode.INTERNAL
        assert "step 1, row 2, block 0" in await lane.call.details()
        assert len(runner.kv_checker.violations) == 1
        again = LaneClient(worker.stub)
        await again.open()
        again.step = 1
        assert not (await again.run(worker_pb2.BatchPlan())).sampled_rows


async def test_the_gate_holds_steps_back() -> None:
    runner = SimRunner(SMALL)
    async with served(loaded_runner(runner)) as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        runner.gate.clear()
        await lane.send(worker_pb2.BatchPlan())
        response = await lane.call.read()
        assert response.heartbeat.last_finished_step == 0
        runner.gate.set()
        assert (await lane.result()).step == 1


def test_vocabulary_and_length_come_from_setting_config_default() -> None:
    def model(config: dict[str, int], **settings: int) -> tuple[int, int]:
        values = WorkerSettings(_cli_parse_args=[], engine="sim", **settings)  # type: ignore[arg-type]
        made = sim_model(values, config)
        return made.vocab_size, made.max_model_len

    config = {"vocab_size": 300, "max_position_embeddings": 64}
    assert model({}) == (32000, 4096)
    assert model(config) == (300, 64)
    assert model(config, sim_vocab_size=7, max_model_len=8) == (7, 8)


async def test_the_process_serves_without_torch(tmp_path: Path) -> None:
    address, modules = f"unix:{tmp_path}/worker.sock", tmp_path / "modules"
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 300, "max_position_embeddings": 64})
    )
    flags = (f"--listen={address}", "--engine=sim", f"--model={tmp_path}", "--sim-step-ms=0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _RUNNER, str(modules), *flags
    )
    try:
        async with grpc.aio.insecure_channel(
            address, options=[("grpc.max_reconnect_backoff_ms", 200)]
        ) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="ready")
            async for response in health.Watch(request, wait_for_ready=True, timeout=60):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            lane = LaneClient(worker_pb2_grpc.WorkerServiceStub(channel))
            hello = await lane.open()
            assert hello.max_model_len == 64
            assert b"vocab_size=300" in hello.model_fingerprint
            await lane.call.done_writing()
            assert await lane.ended() is grpc.StatusCode.OK
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    loaded = {name.partition(".")[0] for name in json.loads(modules.read_text())}
    assert loaded & {"torch", "transformers", "triton", "kernels"} == set()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--engine=sim", "--num-blocks=5", "--max-model-len=96"), "6 blocks"),
        (("--engine=sim", "--sim-step-ms=inf"), "--sim-step-ms"),
        (("--engine=sim", f"--sim-tokens={__file__}"), "not a recording"),
        pytest.param(("--engine=torch",), "--model", marks=pytest.mark.slow),
    ],
)
async def test_wrong_settings_stop_it(
    tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker_svc", f"--listen=unix:{tmp_path}/w.sock", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert complaint in stderr.decode().splitlines()[-1]
