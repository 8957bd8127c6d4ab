"""Recorded passes: which there are, which batches they serve, and what they leave alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_device import HostCapturer, pipelined
from structlog.testing import capture_logs
from tiny_models import llama, save_model
from worker_driver import Sequence, admit, schedule, worker_settings

from quire.internal.v1 import worker_pb2
from worker_svc.cache.kv_pool import KvPool
from worker_svc.gpu.device_forward import DeviceForward
from worker_svc.gpu.device_inputs import ForwardInputs, forward_arrays, padding_arrays
from worker_svc.gpu.graphs import DecodeGraphs, Replay, capture_decode, graph_sizes
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.runner.step_runner import LoadedRunner

_ROWS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def loaded(model: Path) -> LoadedRunner:
    sizes = {"max_num_seqs": _ROWS, "max_num_batched_tokens": 100}
    return load_runner(worker_settings(model, device="cpu", **sizes))


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 16]),
        (40, [1, 2, 4, 8, 16, 32, 48]),
        (512, [1, 2, 4, 8, *range(16, 513, 16)]),
        (1000, [1, 2, 4, 8, *range(16, 513, 16)]),
    ],
)
def test_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert list(graph_sizes(max_num_seqs)) == sizes


def test_the_smallest_that_fits_serves() -> None:
    graphs = DecodeGraphs(dict.fromkeys((4, 1, 16), lambda: None))
    found = [graphs.size_for(rows) for rows in (1, 2, 4, 5, 16, 17)]
    assert found == [1, 4, 4, 16, 16, None]
    assert DecodeGraphs({}).size_for(1) is None


def test_the_largest_is_recorded_first() -> None:
    prepared: list[int] = []

    def prepare(size: int) -> Callable[[], object]:
        prepared.append(size)
        return lambda: None

    capture_decode((1, 4, 2), prepare, HostCapturer())
    assert prepared == [4, 2, 1]


class RefusingCapturer:
    def capture(self, function: Callable[[], object]) -> Replay:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nand so on")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_without_capture_steps_are_launched_and_one_warning_has_the_reason(
    loaded: LoadedRunner,
) -> None:
    with capture_logs() as logs:
        runner = pipelined(loaded, RefusingCapturer())
    [warning] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["reason"] == "operation not permitted when stream is capturing"
    assert run(runner, prompts(3)).sampled_rows == [0, 1, 2]
    assert run(runner, decodes(3)).sampled_rows == [0, 1, 2]


def run(runner: PipelinedRunner, plan: worker_pb2.BatchPlan) -> StepOutput:
    plan.epoch, plan.step = 1, runner.last_finished_step + 1
    return runner.launch(plan_from_proto(plan)).output()


def prompts(num_rows: int) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan()
    for row in range(num_rows):
        admit(plan, Sequence(row, [row + 1, 5], 2, 0, [2 * row + 1, 2 * row + 2]))
        schedule(plan, row, 2)
    return plan


def decodes(num_rows: int) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan()
    for row in range(num_rows):
        schedule(plan, row, 1)
    return plan


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 4), (9, 16), (17, 32)])
def test_batches_of_decoding_rows_alone_are_replayed(
    loaded: LoadedRunner, num_rows: int, size: int
) -> None:
    capturer = HostCapturer()
    runner = pipelined(loaded, capturer)
    run(runner, prompts(num_rows))
    assert sum(capturer.num_replays) == 0
    run(runner, decodes(num_rows))
    # Recorded from the largest down.
    sizes = sorted(graph_sizes(_ROWS), reverse=True)
    assert dict(zip(sizes, capturer.num_replays, strict=True))[size] == 1
    assert sum(capturer.num_replays) == 1
    mixed = decodes(num_rows)
    admit(mixed, Sequence(_ROWS - 1, [1, 2], 2, 0, [99]))
    schedule(mixed, _ROWS - 1, 2)
    run(runner, mixed)
    assert sum(capturer.num_replays) == 1


def test_a_piece_of_a_prompt_of_one_token_samples_nothing(loaded: LoadedRunner) -> None:
    capturer = HostCapturer()
    runner = pipelined(loaded, capturer)
    plan = prompts(2)
    admit(plan, Sequence(2, [1, 2, 3], 3, 0, [50]))
    schedule(plan, 2, 1)
    run(runner, plan)
    assert run(runner, decodes(3)).sampled_rows == [0, 1]
    assert sum(capturer.num_replays) == 1
    assert run(runner, decodes(3)).sampled_rows == [0, 1, 2]


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_padding(loaded: LoadedRunner, num_rows: int) -> None:
    """By ARCHITECTURE.md: slot -1, length 0, and a row whose table is zeros."""
    runner = loaded.runner.runner
    plan = prompts(num_rows)
    plan.step = 1
    runner.launch(plan_from_proto(plan)).output()
    message = decodes(num_rows)
    decode = plan_from_proto(message)
    inputs = runner._tables.prepare(decode.rows, decode.num_scheduled_tokens)
    padded = forward_arrays(decode.rows, inputs, 77, 8 - num_rows)
    alone = forward_arrays(decode.rows, inputs, 77, 0)
    nothing = padding_arrays(77, 8)
    assert list(padded) == list(alone) == list(nothing)
    for name, values in padded.items():
        count = len(alone[name])
        assert values[:count].tolist() == alone[name].tolist()
        assert values[count:].tolist() == nothing[name][count:].tolist()
        assert values.dtype == nothing[name].dtype
    assert padded["slot_mapping"][num_rows:].tolist() == [-1] * (8 - num_rows)
    assert padded["seq_lens"][num_rows:].tolist() == [0] * (8 - num_rows)
    assert padded["rows"][num_rows:].tolist() == [77] * (8 - num_rows)
    assert padded["query_start_loc"].tolist() == list(range(9))


def test_warming_up_and_recording_write_no_slot(loaded: LoadedRunner) -> None:
    caches = [cache for layer in loaded.runner.runner._pool.layers for cache in layer]
    for cache in caches:
        cache.copy_(torch.randn_like(cache))
    before = [cache.clone() for cache in caches]
    runner = pipelined(loaded, HostCapturer())
    assert all(map(torch.equal, caches, before))
    assert not runner._forward.last_tokens.any()
    assert not runner._forward.block_table.any()
    assert runner.last_finished_step == 0


def test_a_null_block_without_numbers_does_no_harm(loaded: LoadedRunner) -> None:
    for layer in loaded.runner.runner._pool.layers:
        for cache in layer:
            cache.fill_(torch.nan)
    runner = pipelined(loaded, HostCapturer())
    for plan in (prompts(3), decodes(3)):
        assert not run(runner, plan).failures


def test_all_kinds_of_steps_run_again_behind_the_recording(
    loaded: LoadedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What recording has left of the memory shows then; and what moves blocks is compiled."""
    events: list[object] = []
    launch, capture = DeviceForward.launch, DeviceForward.capture

    def noted_launch(self: DeviceForward, inputs: ForwardInputs, *rest: Any) -> torch.Tensor:
        events.append((len(inputs.input_ids), len(inputs.seq_lens)))
        return launch(self, inputs, *rest)

    def noted_capture(self: DeviceForward, *rest: Any) -> None:
        capture(self, *rest)
        events.append("recorded")

    monkeypatch.setattr(DeviceForward, "launch", noted_launch)
    monkeypatch.setattr(DeviceForward, "capture", noted_capture)
    monkeypatch.setattr(KvPool, "warm_up", lambda self: events.append("moved"))
    pipelined(loaded, HostCapturer())
    # A prompt as long as the model takes beside the rest of a step, prompts of as many tokens as
    # tiles of products have, one row, all rows.
    tiles = [(8, 1), (16, 1), (64, 1)]
    kinds = [(100, 2), *tiles, (1, 1), (1, 1), (_ROWS, _ROWS), (_ROWS, _ROWS)]
    assert events[: len(kinds) + 1] == [*kinds, "moved"]
    assert events[events.index("recorded") + 1 :] == kinds
