"""Whole blocks copied within caches and between them, all layers at once: exactly."""

from collections.abc import Callable

import pytest
import torch
from paged_cases import FP8, implementations

from kernels.blocks import copy_blocks, swap_blocks, swap_blocks_reference
from kernels.dispatch import Implementation

_DTYPES = [torch.float32, torch.float16, torch.bfloat16, *FP8]


def caches(num_blocks: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Keys and values of two layers, with heads of different dimensions."""
    draw = torch.Generator().manual_seed(num_blocks)
    return [torch.randn(num_blocks, 3, 2, dim, generator=draw).to(dtype) for dim in (5, 8, 16, 1)]


def caches_of_any_bits(num_blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values of a model's size. Among the bits is whatever can be no number."""
    draw = torch.Generator().manual_seed(num_blocks)
    size = num_blocks * 16 * 8 * 128 * dtype.itemsize // 8
    words = torch.empty(2, size, dtype=torch.int64).random_(generator=draw)
    # Of random words, none is negative.
    words[1] = ~words[1]
    return list(words.view(dtype).view(2, num_blocks, 16, 8, 128))


def assert_same_bytes(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture(params=implementations())
def implementation(request: pytest.FixtureRequest) -> Implementation:
    chosen: Implementation = request.param
    return chosen


@pytest.mark.parametrize("dtype", _DTYPES)
def test_swaps_all_layers(implementation: Implementation, dtype: torch.dtype) -> None:
    sources, destinations = caches(7, dtype), caches(5, dtype)
    expected = [cache.clone() for cache in destinations]
    source_ids, destination_ids = torch.tensor([6, 0, 3]), torch.tensor([1, 4, 0])
    swap_blocks_reference(sources, expected, source_ids, destination_ids)
    swap_blocks(sources, destinations, source_ids, destination_ids, implementation=implementation)
    assert_same_bytes(destinations, expected)


@pytest.mark.parametrize(
    ("source_ids", "destination_ids"),
    [
        ([], []),
        ([1], [1]),
        ([1, 1], [2, 3]),
        # A block that is source and destination is read before it is written.
        ([1, 2], [2, 3]),
        ([2, 1], [3, 2]),
        ([1, 2, 3], [2, 3, 1]),
    ],
)
def test_copies_within_all_layers(
    implementation: Implementation, source_ids: list[int], destination_ids: list[int]
) -> None:
    layers = caches(5)
    expected = [cache.clone() for cache in layers]
    for cache, original in zip(expected, caches(5), strict=True):
        for source, destination in zip(source_ids, destination_ids, strict=True):
            cache[destination] = original[source]
    ids = (torch.tensor(source_ids).long(), torch.tensor(destination_ids).long())
    copy_blocks(layers, *ids, implementation=implementation)
    assert_same_bytes(layers, expected)


@pytest.mark.parametrize("num_moves", [63, 129])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_blocks_of_models_are_moved_bit_for_bit(
    implementation: Implementation, dtype: torch.dtype, num_moves: int
) -> None:
    """Within a cache, most of them are sources and destinations at once."""
    layers, others = (caches_of_any_bits(num_blocks, dtype) for num_blocks in (135, 140))
    draw = torch.Generator().manual_seed(num_moves)
    source_ids, destination_ids = (
        torch.randperm(135, generator=draw)[:num_moves] for _ in range(2)
    )
    for sources, destinations in ((layers, others), (layers, layers)):
        expected = [cache.view(torch.uint8).clone() for cache in destinations]
        for cache, source in zip(expected, sources, strict=True):
            cache[destination_ids] = source.view(torch.uint8)[source_ids]
        if destinations is sources:
            copy_blocks(layers, source_ids, destination_ids, implementation=implementation)
        else:
            swap_blocks(
                sources, destinations, source_ids, destination_ids, implementation=implementation
            )
        assert_same_bytes(destinations, expected)


@pytest.mark.parametrize("move", [copy_blocks, lambda c, s, d, **k: swap_blocks(c, c, s, d, **k)])
def test_a_block_that_is_not_there_is_refused(
    implementation: Implementation, move: Callable[..., None]
) -> None:
    for ids in ([5, 0], [0, 5]):
        layers = caches(5)
        with pytest.raises(IndexError):
            move(
                layers,
                torch.tensor(ids[:1]),
                torch.tensor(ids[1:]),
                implementation=implementation,
            )
        assert_same_bytes(layers, caches(5))
