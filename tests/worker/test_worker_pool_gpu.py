"""What a GPU's memory is really filled with."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from tiny_models import llama, save_model
from worker_driver import worker_settings

from worker_svc.loading.runner_loading import load_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.fixture(autouse=True)
def empty_gpu() -> None:
    """Memory of the previous test would count as that of other processes."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(params=[2, 6])
def filled_gpu(request: pytest.FixtureRequest, empty_gpu: None) -> Iterator[None]:
    """Other processes leave so many GiB. The traceback of a failed test does not keep theirs."""
    num_bytes = torch.cuda.mem_get_info()[0] - request.param * 2**30
    others = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    yield
    others.untyped_storage().resize_(0)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_cache_fills_its_share_and_no_more(tmp_path: Path, kv_cache_dtype: str) -> None:
    settings = worker_settings(
        save_model(llama(), tmp_path),
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        num_blocks=None,
        gpu_memory_utilization=0.05,
        kv_cache_dtype=kv_cache_dtype,
        swap_space="1MiB",
    )
    with capture_logs() as logs:
        loaded = load_runner(settings)
    [gpu] = [log for log in logs if log["event"] == "memory of the GPU"]
    [sizing] = [log for log in logs if log["event"] == "key-value cache"]
    assert gpu["total"] == torch.cuda.mem_get_info()[1]
    assert gpu["weights"] > 0
    # Keys and values of the batch are none of it: the model's tables of logits are.
    assert 0 < gpu["peak_activations"] < 2**30
    assert gpu["non_torch"] >= 0
    share = int(gpu["total"] * 0.05)
    left = share - gpu["weights"] - gpu["peak_activations"] - gpu["non_torch"]
    assert sizing["kv_cache_memory"] == left
    assert sizing["block_bytes"] == 16 * 3 * 2 * 16 * (2 if kv_cache_dtype == "auto" else 1)
    assert loaded.identity.num_blocks == left // sizing["block_bytes"]
    # Tables and graphs come on top, out of what the share leaves.
    assert sizing["cache_bytes"] <= torch.cuda.memory_allocated() < share + 2**28


@pytest.mark.usefixtures("filled_gpu")
def test_a_gpu_filled_by_other_processes_has_room_for_the_largest_batch(tmp_path: Path) -> None:
    """What is left is less than the utilization's share: graphs and the largest batch fit beside
    the cache."""
    settings = worker_settings(
        save_model(llama(), tmp_path),
        device="cuda",
        dtype="bfloat16",
        num_blocks=None,
        gpu_memory_utilization=1.0,
        max_num_seqs=512,
        max_num_batched_tokens=8192,
    )
    with capture_logs() as logs:
        load_runner(settings)
    [gpu] = [log for log in logs if log["event"] == "memory of the GPU"]
    assert gpu["allocated_later"] > 0
    assert not [log for log in logs if log["log_level"] == "warning"]
