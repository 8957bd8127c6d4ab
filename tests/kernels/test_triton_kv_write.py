"""Writing cache entries in Triton, against the twin."""

import pytest
import torch
from kv_write_cases import SIZES, bits, kv_write_case
from paged_cases import FP8
from triton_devices import DEVICES, skip_what_is_not_interpreted

from kernels.choice import Implementation
from kernels.kv_write import kv_write, kv_write_reference

TRITON = Implementation.TRITON


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.01, 3.0)])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16, *FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_format_into_any(
    dtype: torch.dtype, cache_dtype: torch.dtype, scales: tuple[float, float], device: str
) -> None:
    skip_what_is_not_interpreted(device, dtype, cache_dtype)
    k_scale, v_scale = scales
    for size in SIZES:
        key, value, k_expected, v_expected, slots = kv_write_case(*size, dtype, cache_dtype)
        k_cache, v_cache = k_expected.to(device), v_expected.to(device)
        kv_write_reference(
            key, value, k_expected, v_expected, slots, k_scale=k_scale, v_scale=v_scale
        )
        kv_write(
            key.to(device),
            value.to(device),
            k_cache,
            v_cache,
            slots.to(device),
            k_scale=k_scale,
            v_scale=v_scale,
            implementation=TRITON,
        )
        for written, expected in ((k_cache, k_expected), (v_cache, v_expected)):
            assert torch.equal(bits(written.cpu()), bits(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", FP8)
def test_eight_bits_are_copied(cache_dtype: torch.dtype, device: str) -> None:
    key, value, k_expected, v_expected, slots = kv_write_case(
        13, 2, 16, 9, cache_dtype, cache_dtype
    )
    k_cache, v_cache = k_expected.to(device), v_expected.to(device)
    kv_write_reference(key, value, k_expected, v_expected, slots)
    moved = (tensor.to(device) for tensor in (key, value))
    kv_write(*moved, k_cache, v_cache, slots.to(device), implementation=TRITON)
    assert torch.equal(bits(k_cache.cpu()), bits(k_expected))
    assert torch.equal(bits(v_cache.cpu()), bits(v_expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", FP8)
def test_every_number_is_rounded_as_torch_does(cache_dtype: torch.dtype, device: str) -> None:
    """All numbers of half precision, and the ties between those of 8 bits with their neighbours."""
    halves = torch.arange(2**16).to(torch.uint16).view(torch.float16).float()
    eights = torch.arange(2**8).to(torch.uint8).view(cache_dtype).float()
    eights = eights[eights.isfinite()].sort().values
    ties = (eights[1:] + eights[:-1]) / 2
    ties = torch.cat([ties, ties.nextafter(ties * 2), ties.nextafter(ties / 2)])
    numbers = torch.cat([halves, eights, ties])
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 256)).view(-1, 1, 256)
    slots = torch.arange(len(numbers))
    expected = torch.zeros(len(numbers), 1, 1, 256).to(cache_dtype)
    written = expected.to(device)
    kv_write_reference(numbers, numbers, expected, expected.clone(), slots)
    numbers = numbers.to(device)
    kv_write(numbers, numbers, written, written.clone(), slots.to(device), implementation=TRITON)
    # NaN has many forms, of either sign.
    found, rounded = (cache.cpu().float().nan_to_num(9e9) for cache in (written, expected))
    assert torch.equal(found, rounded)
    assert torch.equal(found.signbit(), rounded.signbit())


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_write(device: str) -> None:
    key = torch.empty(0, 2, 16, device=device)
    cache = torch.full((3, 4, 2, 16), 7.0, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    kv_write(key, key, cache, cache, slots, implementation=TRITON)
    key, slots = key.new_ones(5, 2, 16), slots.new_full((5,), -1)
    kv_write(key, key, cache, cache, slots, implementation=TRITON)
    assert (cache == 7.0).all()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_slots_past_2_to_the_31() -> None:
    """Of a pool with more numbers than 32 bits count."""
    num_blocks = 2**31 // (16 * 8 * 128) + 2
    cache = torch.zeros(num_blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    key = torch.randn(3, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([5, num_blocks * 16 - 1, 70000], device="cuda")
    kv_write(key, key, cache, cache.clone(), slots, implementation=TRITON)
    assert torch.equal(cache.flatten(0, 1)[slots], key)
    assert cache.count_nonzero() == key.count_nonzero()
