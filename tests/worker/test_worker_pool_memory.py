"""The memory of a pool on a CPU, which is zeroed while the model is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from worker_driver import worker_settings

from worker_svc.cache.kv_pool import AttentionSpec, KvPool
from worker_svc.cache.pool_memory import PoolMemory
from worker_svc.cache.pool_size import PoolSize
from worker_svc.runner.runner_loading import load_runner
from worker_svc.settings import WrongSettingError

_CPU = torch.device("cpu")
_SIZE = 2**20


def test_what_was_zeroed_is_taken() -> None:
    with PoolMemory(_SIZE) as memory:
        assert memory._zeroing is not None
        ahead = memory._zeroing.result()
        taken = memory.take(_SIZE - 1)
    assert taken.data_ptr() == ahead.data_ptr()
    assert (len(taken), taken.dtype, taken.count_nonzero()) == (_SIZE - 1, torch.uint8, 0)


@pytest.mark.parametrize("num_bytes", [0, _SIZE])
def test_a_larger_pool_gets_new_memory(num_bytes: int) -> None:
    with PoolMemory(num_bytes) as memory:
        taken = memory.take(_SIZE + 1)
    assert (len(taken), taken.dtype, taken.count_nonzero()) == (_SIZE + 1, torch.uint8, 0)


def test_nothing_is_left_of_a_model_that_was_not_loaded() -> None:
    with pytest.raises(KeyError), PoolMemory(_SIZE) as memory:
        raise KeyError
    assert memory._zeroing is None


def test_a_pool_in_memory_has_tensors_of_its_own() -> None:
    layers = (
        AttentionSpec(3, 5, 7, torch.float32),
        AttentionSpec(1, 3, 1, torch.float8_e4m3fn),
        AttentionSpec(2, 5, 5, torch.bfloat16),
    )
    with PoolMemory(_SIZE) as memory:
        pool = KvPool(layers, PoolSize(7, 0), 4, _CPU, memory)
    expected = KvPool(layers, PoolSize(7, 0), 4, _CPU)
    caches, others = sum(pool.layers, ()), sum(expected.layers, ())
    assert [(cache.shape, cache.dtype) for cache in caches] == [
        (other.shape, other.dtype) for other in others
    ]
    for number, cache in enumerate(caches, 1):
        assert cache.is_contiguous()
        assert cache.data_ptr() % 64 == 0
        assert cache.float().count_nonzero() == 0
        cache.fill_(number)
    assert all((cache.float() == number).all() for number, cache in enumerate(caches, 1))


@pytest.mark.parametrize(
    ("device", "settings", "is_ahead"),
    [
        ("cpu", {"kv_cache_memory": _SIZE, "num_blocks": None}, True),
        ("cuda", {"kv_cache_memory": _SIZE, "num_blocks": None}, False),
        ("cpu", {"kv_cache_memory": _SIZE, "num_blocks": 10}, False),
        ("cpu", {"kv_cache_memory": _SIZE, "num_blocks": None, "quantization": "int8"}, False),
    ],
)
def test_pools_of_a_known_size_are_zeroed_ahead(
    device: str, settings: dict[str, Any], is_ahead: bool
) -> None:
    wanted = worker_settings(Path("model"), **settings)
    with PoolMemory.ahead(wanted, torch.device(device)) as memory:
        assert (memory.num_bytes >= _SIZE) == is_ahead


def test_a_pool_that_the_host_does_not_hold_ends_the_start_at_once() -> None:
    settings = worker_settings(Path("no model"), kv_cache_memory=2**60, num_blocks=None)
    with pytest.raises(WrongSettingError, match=r"the cache needs .* lower --kv-cache-memory"):
        load_runner(settings)
