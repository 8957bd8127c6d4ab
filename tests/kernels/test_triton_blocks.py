"""Copies of blocks by Triton, within caches and between them, of any bytes."""

from itertools import product

import pytest
import torch
from triton_devices import DEVICES

from kernels.blocks import copy_blocks, swap_blocks, swap_blocks_reference
from kernels.dispatch import Implementation

pytest.importorskip("triton")
from kernels.gpu import blocks as triton_blocks

# Keys and values of two layers: blocks of which some, or all, are vectors of 16 bytes.
_DIMS = {"odd": (5, 8, 16, 1), "even": (8, 32, 16, 64)}
_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def caches(
    dims: str, num_blocks: int, device: str, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(num_blocks)
    return [
        torch.randn(num_blocks, 4, 2, dim, generator=draw).to(dtype).to(device)
        for dim in _DIMS[dims]
    ]


def caches_of_any_bits(num_blocks: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values of a model's size. Among the bits is whatever can be no number."""
    draw = torch.Generator().manual_seed(num_blocks)
    size = num_blocks * 16 * 8 * 128 * dtype.itemsize // 8
    words = torch.empty(2, size, dtype=torch.int64).random_(generator=draw)
    # Of random words, none is negative.
    words[1] = ~words[1]
    return list(words.to(device).view(dtype).view(2, num_blocks, 16, 8, 128))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def on_host(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    return [layer.to("cpu", copy=True) for layer in layers]


def assert_same_bytes(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("dims", _DIMS)
def test_swaps_all_layers(device: str, dims: str, dtype: torch.dtype) -> None:
    sources, destinations = caches(dims, 7, device, dtype), caches(dims, 5, device, dtype)
    expected = on_host(destinations)
    ids = torch.tensor([6, 0, 3]), torch.tensor([1, 4, 0])
    swap_blocks_reference(on_host(sources), expected, *ids)
    swap_blocks(sources, destinations, *ids, implementation=Implementation.TRITON)
    assert_same_bytes(destinations, expected)


@pytest.mark.parametrize(
    ("source_ids", "destination_ids"),
    [
        ([], []),
        ([1], [1]),
        ([1, 1], [2, 3]),
        # A block that is source and destination is read before it is written.
        ([1, 2, 3], [2, 3, 4]),
        ([2, 1], [3, 2]),
        ([1, 2, 3], [2, 3, 1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("dims", _DIMS)
def test_copies_within_all_layers(
    device: str,
    dims: str,
    dtype: torch.dtype,
    source_ids: list[int],
    destination_ids: list[int],
) -> None:
    layers = caches(dims, 5, device, dtype)
    expected = on_host(layers)
    ids = (torch.tensor(source_ids).long(), torch.tensor(destination_ids).long())
    swap_blocks_reference(expected, expected, *ids)
    copy_blocks(layers, *ids, implementation=Implementation.TRITON)
    assert_same_bytes(layers, expected)


@pytest.mark.parametrize(
    ("dtype", "num_moves"),
    [
        (torch.float8_e4m3fn, 63),
        *(
            pytest.param(dtype, num_moves, marks=pytest.mark.slow)
            for dtype, num_moves in (
                *((torch.float32, 63), (torch.float16, 129), (torch.bfloat16, 63)),
                *((torch.float8_e4m3fn, 129), (torch.float8_e5m2, 129)),
            )
        ),
    ],
)
def test_blocks_of_models_are_moved_bit_for_bit(
    device: str, dtype: torch.dtype, num_moves: int
) -> None:
    """Within a cache, most of them are sources and destinations at once."""
    layers, others = (caches_of_any_bits(number, device, dtype) for number in (135, 140))
    draw = torch.Generator().manual_seed(num_moves)
    ids = [torch.randperm(135, generator=draw)[:num_moves] for _ in range(2)]
    for sources, destinations in ((layers, others), (layers, layers)):
        # Bytes: not all of torch's operations support 8-bit numbers.
        expected = [cache.view(torch.uint8) for cache in on_host(destinations)]
        swap_blocks_reference([c.view(torch.uint8) for c in on_host(sources)], expected, *ids)
        if destinations is sources:
            copy_blocks(layers, *ids, implementation=Implementation.TRITON)
        else:
            swap_blocks(sources, destinations, *ids, implementation=Implementation.TRITON)
        assert_same_bytes(destinations, expected)


def test_more_blocks_than_programs_and_blocks_of_many_splits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_blocks, "_DEVICE_PROGRAMS", 3)
    for num_moves, block_size in ((5, 4), (1, 700)):
        layer = torch.randn(12, block_size, 2, 6, device=device)
        ids = torch.arange(num_moves), torch.arange(num_moves) + 6
        expected = [layer.clone()]
        swap_blocks_reference(expected, expected, *ids)
        copy_blocks([layer], *ids, implementation=Implementation.TRITON)
        assert_same_bytes([layer], expected)


def test_a_block_that_is_not_there_is_refused(device: str) -> None:
    for ids in ([5, 0], [0, 5], [-1, 0], [0, -1]):
        layers = caches("even", 5, device)
        wrong = torch.tensor(ids[:1]), torch.tensor(ids[1:])
        with pytest.raises(IndexError, match="0 to 4"):
            copy_blocks(layers, *wrong, implementation=Implementation.TRITON)
        assert_same_bytes(layers, caches("even", 5, device))


def test_caches_that_are_not_alike_are_refused() -> None:
    ids = torch.tensor([0]), torch.tensor([1])
    for source, destination in (
        (torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 16)),
        (torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8).half()),
        (torch.zeros(3, 4, 8, 2).mT, torch.zeros(3, 4, 2, 8)),
    ):
        with pytest.raises(ValueError, match="cache"):
            swap_blocks([source], [destination], *ids, implementation=Implementation.TRITON)


def test_programs_and_splits_are_bounded() -> None:
    for num_moves, words, is_within in product((1, 56, 10**6), (1, 8192, 10**6), (True, False)):
        programs, splits = triton_blocks._grid(num_moves, words, is_within)
        assert 1 <= programs <= num_moves
        assert 1 <= splits <= 16
        assert programs * splits <= (2048 if is_within else 64)


@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
@pytest.mark.parametrize("num_blocks", [16, 600])
def test_blocks_of_a_whole_model(device: str, num_blocks: int) -> None:
    torch.manual_seed(0)
    shape = (num_blocks, 16, 8, 128)
    layers = [torch.randn(shape, device=device).bfloat16() for _ in range(56)]
    expected = [layer.clone() for layer in layers]
    order = torch.randperm(num_blocks)
    ids = order[: num_blocks // 2], order[num_blocks // 2 :]
    swap_blocks_reference(expected, expected, *ids)
    copy_blocks(layers, *ids)
    assert_same_bytes(layers, expected)
