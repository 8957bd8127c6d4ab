"""Writing cache entries: every implementation against the twin, and in interpreted Triton."""

import importlib.util
import sys
from itertools import product
from types import ModuleType

import pytest
import torch
from paged_cases import FP8, implementations

from kernels import kv_write as kv_write_module
from kernels.choice import Implementation
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


def case(
    num_tokens: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
) -> Case:
    """Keys as models give them: heads before tokens in memory. Every third slot is -1."""
    draw = torch.Generator().manual_seed(num_tokens)
    key = torch.randn(num_heads, num_tokens, key_dim, generator=draw).transpose(0, 1)
    value = torch.randn(num_tokens, num_heads, value_dim, generator=draw)
    block_size, num_blocks = 5, num_tokens // 5 + 2
    slots = torch.randperm(num_blocks * block_size, generator=draw)[:num_tokens]
    slots[1::3] = -1
    caches = [
        torch.full((num_blocks, block_size, num_heads, dim), torch.nan).to(cache_dtype)
        for dim in (key_dim, value_dim)
    ]
    return key.to(dtype), value.to(dtype), caches[0], caches[1], slots


SIZES = [(1, 1, 1, 1), (7, 3, 5, 8), (13, 2, 16, 9), (100, 2, 64, 300)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("size", SIZES)
def test_writes_each_token_into_its_slot_and_nothing_else(
    size: tuple[int, int, int, int], implementation: Implementation
) -> None:
    key, value, k_cache, v_cache, slots = case(*size)
    kv_write(key, value, k_cache, v_cache, slots, implementation=implementation)
    for source, cache in ((key, k_cache), (value, v_cache)):
        expected = torch.full_like(cache, torch.nan)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected.view(-1, *cache.shape[2:])[slot] = source[token]
        assert torch.equal(cache.nan_to_num(99), expected.nan_to_num(99))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16, *FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_format_into_any(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for size, scales in product(SIZES, [(1.0, 1.0), (0.01, 3.0)]):
        key, value, k_expected, v_expected, slots = case(*size, dtype, cache_dtype)
        k_scale, v_scale = scales
        kv_write_reference(
            key, value, k_expected, v_expected, slots, k_scale=k_scale, v_scale=v_scale
        )
        for implementation in implementations():
            _, _, k_cache, v_cache, _ = case(*size, dtype, cache_dtype)
            kv_write(
                key,
                value,
                k_cache,
                v_cache,
                slots,
                k_scale=k_scale,
                v_scale=v_scale,
                implementation=implementation,
            )
            assert torch.equal(bits(k_cache), bits(k_expected))
            assert torch.equal(bits(v_cache), bits(v_expected))


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16, *FP8])
def test_every_number_is_rounded_as_torch_does(cache_dtype: torch.dtype) -> None:
    """All numbers of half precision and many of single: ties, the smallest and the largest,
    infinity and NaN; too large ones become the largest of 8 bits."""
    halves = torch.arange(2**16).to(torch.uint16).view(torch.float16).float()
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (2**17,), generator=draw).to(torch.int32)
    numbers = torch.cat([halves, words.view(torch.float32)]).view(-1, 1, 256)
    slots = torch.arange(len(numbers))
    expected, other = (torch.zeros(len(numbers), 1, 1, 256).to(cache_dtype) for _ in range(2))
    kv_write_reference(numbers, numbers, expected, other, slots)
    for implementation in implementations():
        cache = torch.zeros_like(expected)
        kv_write(numbers, numbers, cache, other, slots, implementation=implementation)
        # NaN has many forms, of either sign.
        written, rounded = (found.float().nan_to_num(9e9) for found in (cache, expected))
        assert torch.equal(written, rounded)
        assert torch.equal(written.signbit(), rounded.signbit())


@pytest.mark.parametrize("implementation", implementations())
def test_a_slot_that_is_not_there_is_refused(implementation: Implementation) -> None:
    key, value, k_cache, v_cache, slots = case(7, 3, 5, 8)
    slots[3] = k_cache.shape[0] * k_cache.shape[1]
    with pytest.raises(IndexError):
        kv_write(key, value, k_cache, v_cache, slots, implementation=implementation)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no Triton")
@pytest.mark.parametrize("size", SIZES[:3])
def test_triton_equals_torch(interpreted: ModuleType, size: tuple[int, int, int, int]) -> None:
    key, value, k_cache, v_cache, slots = case(*size)
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    interpreted.kv_write_triton(key, value, k_cache, v_cache, slots)
    kv_write_reference(key, value, k_expected, v_expected, slots)
    assert torch.equal(k_cache.nan_to_num(99), k_expected.nan_to_num(99))
    assert torch.equal(v_cache.nan_to_num(99), v_expected.nan_to_num(99))
