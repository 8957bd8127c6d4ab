"""`quire replay` and `quire explain`, on recordings of simulated and real workers."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from google.protobuf import proto
from tiny_models import llama, save_model
from typer.testing import CliRunner
from worker_driver import (
    Driver,
    LaneClient,
    Sampling,
    Sequence,
    served,
    served_model,
    worker_settings,
)

from quire.cli import app
from quire.internal.v1 import worker_pb2
from quire.replay.recording import read_entries
from worker_svc.loading.runner_loading import load_runner
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.service.recorder import Recorder, RecordingRunner
from worker_svc.sim.runner import SimModel, SimRunner
from worker_svc.sim.runner_loading import loaded_runner

_MODEL = SimModel(vocab_size=1000, max_model_len=96, block_size=4, num_blocks=200)


def quire(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@asynccontextmanager
async def recorded(loaded: LoadedRunner, path: Path) -> AsyncIterator[LaneClient]:
    """A lane of a worker that records."""
    recorder = Recorder(path)
    loaded = replace(loaded, runner=RecordingRunner(loaded.runner, recorder))
    async with served(loaded) as worker:
        recorder.put(worker.servicer.hello())
        yield LaneClient(worker.stub)
    recorder.close()


async def record(loaded: LoadedRunner, path: Path) -> None:
    """A lane that ends with a step that fails."""
    async with recorded(loaded, path) as lane:
        await lane.open()
        driver = Driver(lane)
        sampling = [
            Sampling(temperature=1.0, seed=row, num_logprobs=2 * row, num_prompt_logprobs=row)
            for row in range(3)
        ]
        sequences = [
            Sequence(row, list(range(5, 16 + row)), 11 + row, sampling=sampling[row])
            for row in range(3)
        ]
        await driver.run(sequences, 9)
        await lane.send(worker_pb2.BatchPlan(released_rows=[7]))
        await lane.ended()


def cut_off(path: Path) -> None:
    """Leave the first two thirds."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])


@pytest.fixture
async def recording(tmp_path: Path) -> Path:
    path = tmp_path / "steps"
    await record(loaded_runner(SimRunner(_MODEL)), path)
    return path


def written(entry: worker_pb2.Recording) -> bytes:
    data = io.BytesIO()
    proto.serialize_length_prefixed(entry, data)
    return data.getvalue()


def damage(path: Path) -> int:
    """Spoil the fifth entry; return where it ends."""
    recorded = list(read_entries(path))
    entries = [written(entry) for entry in recorded]
    size = recorded[4].ByteSize()
    entries[4] = entries[4][:-size] + b"\xff" * size
    path.write_bytes(b"".join(entries))
    return sum(map(len, entries[:5]))


def rewritten(path: Path, entries: list[worker_pb2.Recording]) -> Path:
    with path.open("wb") as file:
        for entry in entries:
            proto.serialize_length_prefixed(entry, file)
    return path


async def test_a_recording_replays_equal_on_a_worker_like_it(recording: Path) -> None:
    result = await asyncio.to_thread(quire, "replay", recording)
    assert result.exit_code == 0, result.output
    assert "27 tokens on a simulated worker: all as recorded" in result.output


async def test_several_lanes_are_opened_as_they_were(recording: Path) -> None:
    entries = list(read_entries(recording))
    assert entries[-1].HasField("rows_cleared")
    [admission] = [e for e in entries if e.plan.admissions.rows]
    later = worker_pb2.BatchPlan()
    later.CopyFrom(admission.plan)
    later.epoch, later.step = 2, 1000
    # Its result is empty.
    later.admissions.num_prompt_logprobs[:] = [0] * len(later.admissions.rows)
    entries.append(worker_pb2.Recording(plan=later))
    entries.append(worker_pb2.Recording(result=worker_pb2.StepResult(epoch=2, step=1000)))
    result = await asyncio.to_thread(quire, "replay", rewritten(recording, entries))
    assert result.exit_code == 0, result.output


async def test_differences_are_shown(recording: Path) -> None:
    entries = list(read_entries(recording))
    sampling = [entry.result for entry in entries if entry.result.sampled_token_ids]
    sampling[1].sampled_token_ids[0] += 1
    sampling[2].sampled_rows[0] = 30
    result = await asyncio.to_thread(quire, "replay", rewritten(recording, entries))
    assert result.exit_code == 1
    first, second, summary = result.output.splitlines()
    assert first.startswith(f"step {sampling[1].step}: row {sampling[1].sampled_rows[0]} sampled ")
    assert second.startswith(f"step {sampling[2].step}: sampled rows ")
    assert summary.endswith("2 steps differ")


async def test_log_probabilities_are_compared(recording: Path) -> None:
    entries = list(read_entries(recording))
    sampling = [entry.result for entry in entries if entry.result.HasField("logprobs")]
    sampling[0].logprobs.logprobs[1] += 1e-4
    sampling[1].logprobs.logprobs[1] += 0.01
    sampling[2].logprobs.ranks[0] += 1
    sampling[3].ClearField("logprobs")
    [row, *_] = (row for row in sampling[1].sampled_rows if row)
    # The simulated worker gives what was recorded, so that another one is asked.
    async with served(loaded_runner(SimRunner(_MODEL))) as worker:
        path = rewritten(recording, entries)
        result = await asyncio.to_thread(quire, "replay", path, "--worker", worker.address)
    assert result.exit_code == 1
    # The worker of this same process logs the step that fails.
    differences = [line for line in result.output.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in differences] == [
        f"step {one.step}" for one in sampling[1:4]
    ]
    assert f"row {row} has log-probabilities" in differences[0]
    assert "3 steps differ" in result.output


async def test_what_cannot_be_replayed(recording: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("no recording")
    assert quire("replay", other).exit_code == 2
    refused = await asyncio.to_thread(quire, "replay", recording, "--depth", 0)
    assert (refused.exit_code, "at least 1 (got 0)" in refused.output) == (2, True)
    assert quire("replay", tmp_path / "absent").exit_code == 2
    async with served(loaded_runner(SimRunner(replace(_MODEL, num_blocks=100)))) as worker:
        result = await asyncio.to_thread(quire, "replay", recording, "--worker", worker.address)
    assert result.exit_code == 2
    assert "num_blocks 100, recorded 200" in result.output


async def test_a_truncated_recording_is_replayed_up_to_its_end(
    recording: Path,
) -> None:
    cut_off(recording)
    result = await asyncio.to_thread(quire, "replay", recording)
    assert result.exit_code == 0, result.output
    assert 0 < int(result.output.split()[0]) < 12


async def test_a_damaged_recording_is_not_called_as_recorded(recording: Path) -> None:
    end = damage(recording)
    result = await asyncio.to_thread(quire, "replay", recording)
    assert result.exit_code == 2
    assert f"damaged before byte {end}" in result.output


async def test_a_model_s_recording_replays_on_the_model_and_on_a_simulation(
    tmp_path: Path,
) -> None:
    model = save_model(llama(), tmp_path / "model")
    path = tmp_path / "steps"
    await record(load_runner(worker_settings(model)), path)
    async with served_model(model) as worker:
        result = await asyncio.to_thread(quire, "replay", path, "--worker", worker.address)
        assert result.exit_code == 0, result.output
    simulated = await asyncio.to_thread(quire, "replay", path)
    assert simulated.exit_code == 0, simulated.output
    assert "27 tokens" in simulated.output


async def test_a_step_is_drawn(recording: Path) -> None:
    result = await asyncio.to_thread(quire, "explain", recording, "--step", 1)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "Step 1: 3 rows, 21 scheduled tokens, blocks of 4"
    assert "  0      11         0          7        7       no" in lines
    # The first seven of eleven tokens; two blocks are there for them.
    drawn = "row 0     [5] [6] [7] [8] | [9] [10] [11] 12 | 13 14 15"
    assert drawn in lines
    assert lines[lines.index(drawn) + 1].split() == ["blocks", "1", "|", "2", "|", "-"]
    assert "query_start_loc      0 7 14 21" in lines


async def test_a_later_step_contains_the_tokens_sampled_before(recording: Path) -> None:
    entries = list(read_entries(recording))
    sampled = next(e.result for e in entries if e.result.sampled_token_ids)
    [token, *_], step = sampled.sampled_token_ids, sampled.step + 1
    result = await asyncio.to_thread(quire, "explain", recording, "--step", step)
    assert f"[{token}]" in result.output


async def test_steps_that_are_not_there(recording: Path) -> None:
    result = await asyncio.to_thread(quire, "explain", recording, "--step", 99)
    assert result.exit_code == 1
    assert "no step 99; it has steps 1 to" in result.output
    assert "FILE and --step are required" in quire("explain").output
    assert "omit FILE and --step" in quire("explain", "--example", "--step", 1).output


async def test_the_worked_example_is_as_published() -> None:
    result = await asyncio.to_thread(quire, "explain", "--example")
    assert result.exit_code == 0, result.output
    assert result.output.count("All 10 published arrays are equal.") == 2
    assert "slot_mapping           5  14  13  16  17" in result.output


async def test_the_example_works_with_a_worker_of_any_size() -> None:
    async with served(loaded_runner(SimRunner(_MODEL))) as worker:
        result = await asyncio.to_thread(quire, "explain", "--example", "--worker", worker.address)
    assert result.exit_code == 0, result.output
