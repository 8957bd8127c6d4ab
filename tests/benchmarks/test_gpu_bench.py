"""The GPU benchmark on a CPU: its work, its tables, and that all parts run."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from tiny_models import llama, save_model

from benchmarks.engines.host import EngineError
from benchmarks.engines.workload import Work
from benchmarks.gpu import __main__ as main
from benchmarks.gpu import serving
from benchmarks.gpu.device import Calls
from benchmarks.gpu.fused import fused
from benchmarks.gpu.kernels import decode, prefill, writes
from benchmarks.gpu.paged import PagedTensors, Shape
from benchmarks.gpu.products import products
from benchmarks.gpu.runner_alone import covered, load
from benchmarks.gpu.serving import (
    idle_part,
    runner_row,
    stack_row,
    throughput,
    throughput_part,
)
from benchmarks.gpu.workload import MAX_MODEL_LEN, workload
from benchmarks.report import Part, markdown
from worker_svc.settings import WorkerSettings


class HostDevice:
    torch_device = torch.device("cpu")
    cache_bytes = 1

    def median_seconds(self, functions: Mapping[str, Calls]) -> dict[str, float]:
        seconds = {}
        for name, calls in functions.items():
            began_s = time.perf_counter()
            for call in calls:
                call()
            seconds[name] = time.perf_counter() - began_s
        return seconds


def test_the_work_is_that_of_nano_vllm() -> None:
    work = workload()
    assert sum(map(len, work.prompts)) == 142_827
    assert work.num_output_tokens == 133_966
    lengths = map(sum, zip(map(len, work.prompts), work.num_outputs, strict=True))
    assert max(lengths) == 2011 < MAX_MODEL_LEN


def test_kernels_are_measured() -> None:
    device = HostDevice()
    for part, num_rows in ((writes(device, 512), 2), (decode(device, 64), 8)):
        assert len(part.rows) == num_rows
        assert all(row["of_copy"] > 0 for row in part.rows)
        assert part.title in markdown(part)


def test_prefill_is_measured() -> None:
    assert len(prefill(HostDevice(), 64).rows) == 6


def test_products_are_measured() -> None:
    part = products(HostDevice(), 64)
    assert len(part.rows) == 24
    assert all(row["times_torch"] > 0 for row in part.rows)
    # A single row is limited by the bandwidth.
    assert len(part.targets) == 6
    assert part.title in markdown(part)


def test_operations_between_products_are_measured() -> None:
    part = fused(HostDevice(), 128)
    # Two models, three operations, batches of 1, 2 and 64 rows.
    assert len(part.rows) == 18
    assert all(row["times_torch"] > 0 for row in part.rows)
    # The largest batch is limited by the bandwidth.
    assert len(part.targets) == 6
    assert part.title in markdown(part)


def test_a_wrong_kernel_is_not_measured() -> None:
    batch = PagedTensors(Shape(2, 20, 1, 16, 4, 2, 16), torch.device("cpu"))
    batch.check()
    batch._v_cache *= 1.1
    with pytest.raises(ValueError, match="the kernel is wrong"):
        batch.check()


def test_the_runner_alone_runs_the_work(tmp_path: Path) -> None:
    settings = WorkerSettings(
        _cli_parse_args=[],
        model=str(save_model(llama(), tmp_path)),
        device="cpu",
        block_size=4,
        num_blocks=200,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    alone, attention = load(settings)
    assert attention == "paged"
    work = Work([[1, 2, 3]] * 6, [5] * 6, 0.6)
    for _ in range(2):
        found = alone.run(work)
        assert found["num_tokens"] == 30
        assert 0 < found["times"]["decode"]["steps"] < found["times"]["all"]["steps"]
    decoded = alone.decode(2, 20, num_steps=4)
    assert decoded["step_ms"] > decoded["between_ms"] >= 0
    assert decoded["busy_ms"] is decoded["num_records"] is None
    result = {**found, "attention": attention}
    row = runner_row("alone", work, [result])
    assert row["decode_ms"] > 0
    assert 0 <= row["between_share"] < 1
    assert runner_row("alone", work, [result], has_graphs=False)["between_share"] is None


def test_the_stacks_target_is_relative_to_its_runner() -> None:
    sums = {"waiting_ns": 1e6, "preparing_ns": 1e6, "forward_ns": 7e6, "sampling_ns": 1e6}
    times = {"decode": {**sums, "steps": 5}}
    result = {"seconds": 10.0, "times": times, "attention": "paged"}
    work = Work([[1]], [100])
    alone = runner_row("the runner", work, [result])
    assert alone["decode_ms"] == pytest.approx(2.0)
    assert alone["between_share"] == pytest.approx(0.2)
    stack = stack_row("the stack", work, [{"seconds": 10.5}])
    other = {**alone, "tokens_per_s": 1000.0}
    alone["kind"], stack["kind"] = "runner", "stack"
    part = throughput_part(work, [alone, stack, other])
    assert [target.met for target in part.targets] == [True]
    assert part.targets[0].measured == "0.95"
    # Nor to one with another block size.
    for rows in ([alone], [stack], [stack, other]):
        assert not throughput_part(work, rows).targets


class FakeHost:
    """Stands in for `Host`; "broken" fails on every command."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> "FakeHost":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, command: str) -> object:
        if self._kind == "broken":
            raise EngineError("it has ended")
        sums = {"waiting_ns": 1, "preparing_ns": 1, "forward_ns": 7, "sampling_ns": 1, "steps": 5}
        return {"seconds": 10.0, "times": {"decode": sums}, "attention": self._kind}


def test_a_failing_system_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_runner(folder: Path, block_size: int, **settings: object) -> FakeHost:
        return FakeHost("broken" if settings.get("enable_torch_compile") else "paged")

    monkeypatch.setattr(serving, "start_runner", start_runner)
    monkeypatch.setattr(serving, "start_stack", lambda folder, block_size: FakeHost("stack"))
    parts: list[Part] = []
    with pytest.raises(RuntimeError, match=r"Not measured: .*compiled"):
        parts.extend(throughput(tmp_path))
    assert [len(part.rows) for part in parts] == [1, 2, 3, 3, 3, 4, 5]
    assert [len(part.targets) for part in parts] == [0, *[1] * 6]
    missing = [note for note in parts[-1].notes if note.startswith("Not measured")]
    assert [("compiled" in note) for note in missing] == [True, True]


def test_a_failing_part_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str) -> Part:
        return Part(name, name.upper(), [], [], [], [])

    def breaks_off(folder: Path) -> Iterator[Part]:
        yield part("half")
        raise RuntimeError("cut off")

    def fails(folder: Path) -> Iterator[Part]:
        raise RuntimeError("not at all")

    parts = {
        "half": main.Benchmark(breaks_off),
        "none": main.Benchmark(fails),
        "untested": main.Benchmark(lambda folder: [part("untested")], "no such test"),
        "whole": main.Benchmark(lambda folder: [part("whole")]),
    }
    written: list[str] = []
    monkeypatch.setattr(main, "PARTS", parts)
    monkeypatch.setattr(main, "_pass", lambda name: False)
    monkeypatch.setattr(main, "device_description", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        main.results, "write", lambda name, measured, order: written.append(measured.part.name)
    )
    known = {"whole": 1}
    monkeypatch.setattr(main.results, "num_rows", lambda name, part: known.get(part, 0))
    folder = ["--folder", str(tmp_path)]
    for one, status in (("half", 1), ("none", 1), ("untested", 1), ("whole", 0)):
        assert main.main([*folder, "--commit", "abc", one]) == status
    assert written == ["half", "whole"]
    # A shorter table does not replace a longer one.
    known["half"] = 1
    written.clear()
    assert main.main([*folder, "--commit", "abc", "half"]) == 1
    assert written == []
    known.clear()
    written.clear()
    assert main.main([*folder, "--commit", "abc"]) == 1
    assert written == ["half", "whole"]
    printed = capsys.readouterr()
    assert "untested is not measured" in printed.out
    assert "not at all" in printed.err
    # Outside of a repository --commit is required.
    monkeypatch.setattr(main, "description", lambda: {"commit": None})
    assert main.main(folder) == 2
    assert main.main([*folder, "--no-write", "whole"]) == 0


def test_idle_time_is_not_covered_by_a_record() -> None:
    found = {"num_rows": 256, "step_ms": 4.0, "between_ms": 0.4, "num_records": 300.0}
    recorded, unrecorded = (
        idle_part([{**found, "busy_ms": 3.9}]),
        idle_part([{**found, "busy_ms": None}]),
    )
    assert recorded.rows[0]["idle_share"] == pytest.approx(0.025)
    assert recorded.targets[0].met
    assert unrecorded.rows[0]["idle_share"] == pytest.approx(0.1)
    assert not unrecorded.targets[0].met
    assert "| -" in markdown(unrecorded)


def test_overlapping_intervals_count_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1.5, 1.75)]) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    assert capsys.readouterr().out == "No GPU found: nothing is measured.\n"
