"""The largest batch, its memory on a GPU that is made up, and the size that comes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, gemma2, llama, save_model
from worker_driver import BLOCK_SIZE, worker_settings

from kernels.dispatch import choose
from worker_svc.cache.cache_setup import CacheSetup, set_up_cache
from worker_svc.cache.kv_pool import AttentionSpec
from worker_svc.cache.pool_size import DeviceMemory, PoolSize
from worker_svc.cache.profiling import ProfileRun, largest_batch, measure
from worker_svc.errors import WrongSettingError
from worker_svc.gpu.device_memory import CudaMeter, MemoryReading
from worker_svc.gpu.staging import largest_step_bytes
from worker_svc.model.loading import load_model

_CPU = torch.device("cpu")
_MB = 1_000_000
_WEIGHTS, _ACTIVATIONS, _OTHERS, _LIBRARIES, _TOTAL = (
    size * _MB for size in (400, 70, 50, 30, 2000)
)


class MadeUpGpu:
    """A GPU that holds weights; the batch takes activations beside `cache_bytes` of its own."""

    def __init__(self, cache_bytes: int) -> None:
        self._peak = _WEIGHTS + _ACTIVATIONS + cache_bytes
        self.num_restarts = self.num_readings = 0

    def reset(self) -> None:
        self.num_restarts += 1

    def read(self) -> MemoryReading:
        self.num_readings += 1
        has_run = self.num_readings > 1
        peak = self._peak if has_run else _WEIGHTS
        reserved = peak + 5 * _MB
        return MemoryReading(
            total=_TOTAL,
            free=_TOTAL - reserved - _OTHERS - _LIBRARIES * has_run,
            allocated=_WEIGHTS,
            reserved=reserved,
            peak=peak,
        )


def test_the_largest_batch_has_every_token_and_row() -> None:
    batch = largest_batch(50, 4, 96, 8, VOCAB_SIZE)
    inputs = batch.inputs
    assert inputs.seq_lens.tolist() == [13, 13, 12, 12]
    assert inputs.query_start_loc.tolist() == [0, 13, 26, 38, 50]
    assert inputs.logits_indices.tolist() == [12, 25, 37, 49]
    assert inputs.positions.tolist() == [*range(13), *range(13), *range(12), *range(12)]
    assert batch.block_table.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert len(set(inputs.slot_mapping.tolist())) == 50
    # The null block belongs to no row.
    assert inputs.slot_mapping.min() == 8
    assert batch.num_blocks == 9
    assert inputs.input_ids.min() >= 0
    assert inputs.input_ids.max() < VOCAB_SIZE
    assert len(np.unique(inputs.input_ids)) > 20


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "lens"), [(3, 8, [1, 1, 1]), (500, 2, [96, 96]), (7, 1, [7])]
)
def test_neither_more_rows_than_tokens_nor_longer_ones_than_the_model(
    num_tokens: int, num_rows: int, lens: list[int]
) -> None:
    assert largest_batch(num_tokens, num_rows, 96, 8, 10).inputs.seq_lens.tolist() == lens


def test_the_memory_of_a_run() -> None:
    gpu = MadeUpGpu(cache_bytes=1234)
    run = ProfileRun((), 1234)
    assert measure(gpu, lambda: run) == (
        run,
        DeviceMemory(_TOTAL, _OTHERS, _WEIGHTS, _ACTIVATIONS, _LIBRARIES),
    )
    # Before, so that the peak is the run's; after, so that nothing of it stays.
    assert gpu.num_restarts == 2


def test_memory_freed_by_other_processes_is_not_counted() -> None:
    class Freed(MadeUpGpu):
        def read(self) -> MemoryReading:
            reading = super().read()
            return replace(reading, free=reading.free + 3 * _LIBRARIES * (self.num_readings > 1))

    assert measure(Freed(0), lambda: ProfileRun((), 0))[1].non_torch == 0


def test_a_reading_has_the_values_of_torch_and_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "mem_get_info": (60, 100),
        "memory_allocated": 20,
        "memory_reserved": 25,
        "max_memory_allocated": 23,
        "synchronize": None,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    reading = CudaMeter(torch.device("cuda")).read()
    assert reading == MemoryReading(total=100, free=60, allocated=20, reserved=25, peak=23)
    assert reading.non_torch == 15


def scratch_bytes(layers: tuple[AttentionSpec, ...], num_blocks: int) -> int:
    """Layers of one shape share their blocks."""
    return sum(shape.token_bytes for shape in set(layers)) * num_blocks * BLOCK_SIZE


def set_up(folder: Path, **changes: Any) -> CacheSetup:
    """On the made-up GPU, 64 tokens in 4 rows."""
    settings = worker_settings(
        folder,
        **{"num_blocks": None, "max_num_batched_tokens": 64, "max_num_seqs": 4, **changes},
    )
    model = load_model(str(folder), None, "auto", _CPU, None)
    gpu = MadeUpGpu(scratch_bytes(model.layers, 1 + 64 // BLOCK_SIZE))
    return set_up_cache(model, settings, choose("cpu", ()), None, gpu)


@pytest.mark.parametrize(("kv_cache_dtype", "dtype_bytes"), [("auto", 4), ("fp8_e5m2", 1)])
def test_every_term_of_the_size_is_in_the_log(
    tmp_path: Path, kv_cache_dtype: str, dtype_bytes: int
) -> None:
    folder = save_model(gemma2(), tmp_path)
    with capture_logs() as logs:
        cache = set_up(folder, kv_cache_dtype=kv_cache_dtype, swap_space=50_000)
    [gpu] = [log for log in logs if log["event"] == "memory of the GPU"]
    [sizing] = [log for log in logs if log["event"] == "key-value cache"]
    assert (gpu["weights"], gpu["peak_activations"]) == (_WEIGHTS, _ACTIVATIONS)
    assert (gpu["total"], gpu["others"], gpu["non_torch"]) == (_TOTAL, _OTHERS, _LIBRARIES)
    left = int(gpu["total"] * gpu["gpu_memory_utilization"])
    left -= gpu["weights"] + gpu["peak_activations"] + gpu["non_torch"]
    # 3 layers, 2 heads, 8 numbers for keys and 8 for values.
    cache_block_bytes = BLOCK_SIZE * 3 * 2 * (8 + 8) * dtype_bytes
    assert sizing["block_bytes"] == cache_block_bytes
    assert sizing["kv_cache_memory"] == left == 1300 * _MB
    assert cache.size == PoolSize(left // cache_block_bytes, 50_000 // cache_block_bytes)
    assert (sizing["num_blocks"], sizing["num_host_blocks"]) == tuple(vars(cache.size).values())


def test_a_requested_cache_is_compared_with_free_memory(tmp_path: Path) -> None:
    folder = save_model(llama(), tmp_path)
    block_bytes = BLOCK_SIZE * 3 * 2 * 16 * 4
    with capture_logs() as logs:
        assert set_up(folder, num_blocks=100).size.num_blocks == 100
    [gpu] = [log for log in logs if log["event"] == "memory of the GPU"]
    # Graphs of 1, 2 and 4 rows and their logits; tables and buffers, with counts of tokens; a
    # granule for each graph and each of six tensors; a workspace, and segments of graphs and steps.
    graphs = _ACTIVATIONS // 16 + 4 * VOCAB_SIZE * 4
    tables = 5 * 24 * 4 + largest_step_bytes(4, 64, 24) + 6 * 4 * VOCAB_SIZE
    rounding = (3 + 6) * 2 * 2**20 + (32 + 2 * 22) * 2**20
    assert gpu["allocated_later"] == graphs + tables + rounding
    left = _TOTAL - _WEIGHTS - _ACTIVATIONS - _OTHERS - _LIBRARIES - gpu["allocated_later"]
    assert set_up(folder, kv_cache_memory=left).size.num_blocks == left // block_bytes
    with pytest.raises(WrongSettingError, match=r"GiB of the GPU's 1\.9 GiB are left"):
        set_up(folder, kv_cache_memory=left + 1)
    with pytest.raises(WrongSettingError, match=r"of the GPU's 1\.9 GiB are left"):
        set_up(folder, num_blocks=left // block_bytes + 1)
    with pytest.raises(WrongSettingError, match="--gpu-memory-utilization"):
        set_up(folder, gpu_memory_utilization=0.25)
    with pytest.raises(WrongSettingError, match=f"{MAX_MODEL_LEN} tokens needs 24 blocks"):
        set_up(folder, kv_cache_memory=20 * block_bytes)


def test_the_error_of_a_large_batch_names_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("worker_svc.cache.cache_setup.run_batch", run)
    with pytest.raises(WrongSettingError, match=r"64 tokens in 4 rows.*--max-num-batched-tokens"):
        set_up(save_model(llama(), tmp_path))
