"""Writing cache entries: every implementation against the reference."""

from itertools import product
from typing import Any

import pytest
import torch
from kv_write_cases import SIZES, bits, kv_write_case
from paged_cases import FP8, implementations
from pairwise import pairwise

from kernels.dispatch import Implementation
from kernels.kv_write import kv_write, kv_write_reference

_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_CACHE_DTYPES = [*_DTYPES, *FP8]
_SCALES = [(1.0, 1.0), (0.01, 3.0)]
_FACTORS = {
    "dtype": _DTYPES,
    "cache_dtype": _CACHE_DTYPES,
    "num_tokens": [1, 63, 100, 129],
    "num_heads": [4, 8],
    "head_dim": [64, 80, 96, 128, 256],
    "block_size": [8, 16, 256],
    "scales": _SCALES,
}


@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("size", SIZES)
def test_writes_each_token_into_its_slot_and_nothing_else(
    size: tuple[int, int, int, int], implementation: Implementation
) -> None:
    key, value, k_cache, v_cache, slots = kv_write_case(*size)
    kv_write(key, value, k_cache, v_cache, slots, implementation=implementation)
    for source, cache in ((key, k_cache), (value, v_cache)):
        expected = torch.full_like(cache, torch.nan)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected.view(-1, *cache.shape[2:])[slot] = source[token]
        assert torch.equal(cache.nan_to_num(99), expected.nan_to_num(99))


@pytest.mark.parametrize("cache_dtype", _CACHE_DTYPES)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_any_format_into_any(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for size, scales in product(SIZES, _SCALES):
        assert_all_write_what_the_reference_writes((*size, dtype, cache_dtype), scales)


@pytest.mark.parametrize("factors", pairwise(_FACTORS), ids=str)
def test_sizes_of_models(factors: dict[str, Any]) -> None:
    size = (factors["num_tokens"], factors["num_heads"], factors["head_dim"], factors["head_dim"])
    formats = (factors["dtype"], factors["cache_dtype"])
    assert_all_write_what_the_reference_writes(
        (*size, *formats, factors["block_size"]), factors["scales"]
    )


def assert_all_write_what_the_reference_writes(
    arguments: tuple[Any, ...], scales: tuple[float, float]
) -> None:
    """Bit for bit. `arguments` are those of `kv_write_case`."""
    options = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    key, value, k_expected, v_expected, slots = kv_write_case(*arguments)
    kv_write_reference(key, value, k_expected, v_expected, slots, **options)
    for implementation in implementations():
        _, _, k_cache, v_cache, _ = kv_write_case(*arguments)
        kv_write(key, value, k_cache, v_cache, slots, implementation=implementation, **options)
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
    key, value, k_cache, v_cache, slots = kv_write_case(7, 3, 5, 8)
    slots[3] = k_cache.shape[0] * k_cache.shape[1]
    with pytest.raises(IndexError):
        kv_write(key, value, k_cache, v_cache, slots, implementation=implementation)
