"""Writing and copying cache entries, in torch and in interpreted Triton."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from kernels import kv_write as kv_write_module
from kernels.blocks import copy_blocks
from kernels.kv_write import kv_write, kv_write_reference


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A second copy of the module, whose kernels Triton interprets."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("interpreted_kv_write", kv_write_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(num_tokens: int, num_heads: int, key_dim: int, value_dim: int) -> Case:
    """Keys as models give them: heads before tokens in memory. Every third slot is -1."""
    draw = torch.Generator().manual_seed(num_tokens)
    key = torch.randn(num_heads, num_tokens, key_dim, generator=draw).transpose(0, 1)
    value = torch.randn(num_tokens, num_heads, value_dim, generator=draw)
    block_size, num_blocks = 5, num_tokens // 5 + 2
    slots = torch.randperm(num_blocks * block_size, generator=draw)[:num_tokens]
    slots[1::3] = -1
    caches = [
        torch.full((num_blocks, block_size, num_heads, dim), torch.nan)
        for dim in (key_dim, value_dim)
    ]
    return key, value, caches[0], caches[1], slots


SIZES = [(1, 1, 1, 1), (7, 3, 5, 8), (13, 2, 16, 9)]


@pytest.mark.parametrize("size", SIZES)
def test_writes_each_token_into_its_slot_and_nothing_else(size: tuple[int, int, int, int]) -> None:
    key, value, k_cache, v_cache, slots = case(*size)
    kv_write(key, value, k_cache, v_cache, slots)
    for source, cache in ((key, k_cache), (value, v_cache)):
        expected = torch.full_like(cache, torch.nan)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected.view(-1, *cache.shape[2:])[slot] = source[token]
        assert torch.equal(cache.nan_to_num(99), expected.nan_to_num(99))


@pytest.mark.skipif(sys.platform != "linux", reason="there is no Triton")
@pytest.mark.parametrize("size", SIZES)
def test_triton_equals_torch(interpreted: ModuleType, size: tuple[int, int, int, int]) -> None:
    key, value, k_cache, v_cache, slots = case(*size)
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    interpreted.kv_write_triton(key, value, k_cache, v_cache, slots)
    kv_write_reference(key, value, k_expected, v_expected, slots)
    assert torch.equal(k_cache.nan_to_num(99), k_expected.nan_to_num(99))
    assert torch.equal(v_cache.nan_to_num(99), v_expected.nan_to_num(99))


def test_copies_blocks_reading_before_writing() -> None:
    cache = torch.arange(4.0).view(4, 1, 1, 1).repeat(1, 2, 3, 4)
    copy_blocks([cache], torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert cache[:, 0, 0, 0].tolist() == [0, 1, 1, 2]
