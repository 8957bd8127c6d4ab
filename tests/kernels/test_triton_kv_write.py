"""Writing cache entries in Triton, against the reference."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kv_write_cases import SIZES, bits, kv_write_case
from paged_cases import FP8
from pairwise import pairwise
from triton_devices import DEVICES, NEEDS_GPU, skip_what_is_not_interpreted

from kernels.dispatch import Implementation
from kernels.kv_write import kv_write, kv_write_reference

TRITON = Implementation.TRITON
_SCALES = [(1.0, 1.0), (0.01, 3.0)]
_FACTORS: dict[str, Sequence[Any]] = {
    "dtype": [torch.float32, torch.float16],
    "cache_dtype": [torch.float32, torch.float16, *FP8],
    "num_tokens": [129, 100, 63, 1],
    "num_heads": [8, 4],
    "head_dim": [256, 64, 80, 96, 128],
    "block_size": [8, 16, 256],
    "scales": _SCALES,
}
_WITH_BFLOAT16 = {name: [*_FACTORS[name], torch.bfloat16] for name in ("dtype", "cache_dtype")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", [_SCALES[1], pytest.param(_SCALES[0], marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16, *FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_format_into_any(
    dtype: torch.dtype, cache_dtype: torch.dtype, scales: tuple[float, float], device: str
) -> None:
    skip_what_is_not_interpreted(device, dtype, cache_dtype)
    for size in SIZES:
        assert_writes_what_the_reference_writes((*size, dtype, cache_dtype), scales, device)


@pytest.mark.parametrize(
    ("factors", "device"),
    [
        *(
            pytest.param(factors, *DEVICES[0].values, marks=DEVICES[0].marks)
            for factors in pairwise(_FACTORS)
        ),
        *(
            pytest.param(factors, "cuda", marks=NEEDS_GPU)
            for factors in pairwise(_FACTORS | _WITH_BFLOAT16)
        ),
    ],
    ids=str,
)
def test_sizes_of_models(factors: dict[str, Any], device: str) -> None:
    size = (factors["num_tokens"], factors["num_heads"], factors["head_dim"], factors["head_dim"])
    formats = (factors["dtype"], factors["cache_dtype"])
    arguments = (*size, *formats, factors["block_size"])
    assert_writes_what_the_reference_writes(arguments, factors["scales"], device)


def assert_writes_what_the_reference_writes(
    arguments: tuple[Any, ...], scales: tuple[float, float], device: str
) -> None:
    """Bit for bit. `arguments` are those of `kv_write_case`."""
    options = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    key, value, k_expected, v_expected, slots = kv_write_case(*arguments)
    k_cache, v_cache = k_expected.to(device, copy=True), v_expected.to(device, copy=True)
    kv_write_reference(key, value, k_expected, v_expected, slots, **options)
    kv_write(
        key.to(device),
        value.to(device),
        k_cache,
        v_cache,
        slots.to(device),
        implementation=TRITON,
        **options,
    )
    for written, expected in ((k_cache, k_expected), (v_cache, v_expected)):
        assert torch.equal(bits(written.cpu()), bits(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", FP8)
def test_eight_bits_are_copied(cache_dtype: torch.dtype, device: str) -> None:
    arguments = (13, 2, 16, 9, cache_dtype, cache_dtype)
    assert_writes_what_the_reference_writes(arguments, (1.0, 1.0), device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16, *FP8])
def test_every_number_is_rounded_as_torch_does(cache_dtype: torch.dtype, device: str) -> None:
    """All numbers of half precision, many of single, and the ties between the half ones, or between
    those of 8 bits, with their neighbours; infinity and NaN among them."""
    skip_what_is_not_interpreted(device, cache_dtype)
    halves = torch.arange(2**16).to(torch.uint16).view(torch.float16).float()
    stored = halves
    if cache_dtype.itemsize == 1:
        stored = torch.arange(2**8).to(torch.uint8).view(cache_dtype).float()
    stored = stored[stored.isfinite()].sort().values
    ties = (stored[1:] + stored[:-1]) / 2
    ties = torch.cat([ties, ties.nextafter(ties * 2), ties.nextafter(ties / 2)])
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (2**16,), generator=draw).to(torch.int32)
    numbers = torch.cat([halves, stored, ties, words.view(torch.float32)])
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 256)).view(-1, 1, 256)
    slots = torch.arange(len(numbers))
    expected = torch.zeros(len(numbers), 1, 1, 256).to(cache_dtype)
    written = expected.to(device, copy=True)
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
