"""Launch parameters of Triton's kernels: tiles that fit, and enough programs."""

from itertools import product

import pytest
import torch

from kernels.gpu.fused.tiles import MOST_NORM_NUMBERS, activation_tile, norm_tile, rotation_tile
from kernels.gpu.launch import (
    INTERPRETED,
    Gpu,
    attention_launch,
    decode_tile_rows,
    fewest_partition_keys,
    kv_write_rows,
    num_partitions,
    padded_dim,
    stride_unit,
)
from kernels.gpu.linear_launch import ROW_TILES, linear_launch, num_splits

H200 = Gpu((9, 0), 132)
A100 = Gpu((8, 0), 108)
L40 = Gpu((8, 9), 142)


@pytest.mark.parametrize("gpu", [H200, A100, L40], ids=["H200", "A100", "L40"])
def test_tiles_fit_into_shared_memory(gpu: Gpu) -> None:
    formats = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, dim, block_size, group_size, is_decode in product(
        formats, (16, 64, 128, 256), (1, 16, 256), (1, 40, 200), (False, True)
    ):
        rows = decode_tile_rows(group_size, dtype, dim)
        launch = attention_launch(gpu, (dim, dim), dtype, dtype, block_size, rows, is_decode)
        stages = max(launch.num_stages - 1, 1)
        numbers = launch.tile_rows * dim + launch.tile_keys * 2 * dim * stages
        assert numbers * dtype.itemsize < gpu.shared_bytes
        assert launch.tile_rows == rows if is_decode else launch.tile_rows >= rows
        assert launch.tile_keys >= 16
        for size in (launch.tile_rows, launch.tile_keys):
            assert size & (size - 1) == 0


def test_interpreted_launches_are_those_of_the_target() -> None:
    assert INTERPRETED == H200


@pytest.mark.parametrize(
    ("group_size", "rows"), [(1, 16), (5, 16), (16, 16), (17, 32), (128, 128), (200, 128)]
)
def test_a_token_s_heads_fill_a_tile(group_size: int, rows: int) -> None:
    assert decode_tile_rows(group_size, torch.bfloat16, 256) == rows
    assert decode_tile_rows(group_size, torch.float32, 128) == min(rows, 32)
    # Wide heads in single precision leave registers for no more.
    assert decode_tile_rows(group_size, torch.float32, 256) == 16


def test_stride_unit_is_given_where_the_compiler_does_not_detect_it() -> None:
    assert stride_unit([2048, 128, 16]) == 1
    assert stride_unit([960, 120, 16]) == 8
    assert stride_unit([960, 120, 4]) == 1


def test_a_few_sequences_are_cut_into_enough_parts() -> None:
    for num_programs in (1, 8, 64, 100, 600, 1000):
        parts = num_partitions(H200, num_programs, 1 << 17)
        assert parts == 128 or num_programs * parts >= 8 * H200.num_multiprocessors
    assert num_partitions(H200, 64, 1 << 17) > num_partitions(A100, 64, 1 << 17)


def test_parts_are_not_too_small() -> None:
    assert num_partitions(H200, 1, 256) == 1
    assert num_partitions(H200, 1, 257) == 2
    assert num_partitions(H200, 1, 0) == 1
    assert num_partitions(H200, 0, 1000) == 4
    assert num_partitions(H200, 8 * 132, 1 << 17) == 1


def test_parts_are_whole_tiles() -> None:
    assert fewest_partition_keys(None, 64) == 256
    assert fewest_partition_keys(1, 64) == 64
    assert fewest_partition_keys(65, 64) == 128


def test_sizes_are_padded_to_what_tensor_cores_take() -> None:
    assert [padded_dim(dim) for dim in (1, 16, 64, 80, 96, 128, 192)] == [
        *(16, 16, 64, 128, 128, 128, 256)
    ]


def test_a_program_writes_some_rows() -> None:
    assert kv_write_rows(128, 2) == 32
    assert kv_write_rows(16, 1) == 512
    assert kv_write_rows(8192, 4) == 1


@pytest.mark.parametrize("gpu", [H200, A100, L40], ids=["H200", "A100", "L40"])
def test_tiles_of_products_fit_into_shared_memory(gpu: Gpu) -> None:
    formats = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
    for dtype, rows, splits, (step_bytes, step_inputs) in product(
        formats, (1, 17, 4096), (1, 4), ((16, 16), (64, 128), (128, 128))
    ):
        launch = linear_launch(gpu, rows, splits, dtype, step_bytes, step_inputs, splits % 2)
        row_bytes = launch.tile_rows * step_inputs * dtype.itemsize
        stages = max(launch.num_stages - 1, 1)
        assert (launch.tile_outputs * step_bytes + row_bytes) * stages < gpu.shared_bytes
        assert launch.tile_rows >= min(rows, 32)
        assert launch.split_programs == (splits > 1 and rows == 1)


def test_products_with_few_outputs_are_divided() -> None:
    assert num_splits(H200, 4096, 4096) == 4
    assert num_splits(H200, 1024, 65_536) == 8
    # Too few inputs, and enough outputs.
    assert num_splits(H200, 1024, 1024) == 1
    assert num_splits(H200, 151_936, 8192) == 1
    assert num_splits(A100, 4096, 14_336) == 3
    assert num_splits(H200, 1, 1) == 1


def test_the_warm_up_knows_all_sizes_of_tiles() -> None:
    found = {
        linear_launch(H200, rows, 1, dtype, 64, 128, 0).tile_rows
        for dtype in (torch.bfloat16, torch.int8)
        for rows in range(1, 5000)
    }
    assert found == set(ROW_TILES)


def test_only_sums_of_integers_change_instructions_with_the_rows() -> None:
    """Programs of fewer than four warps add up the inputs of a step in another order."""
    for rows in (1, 8, 9, 16, 17, 4096):
        assert linear_launch(H200, rows, 1, torch.bfloat16, 64, 128, 1).num_warps >= 4
        assert (linear_launch(H200, rows, 1, torch.int8, 128, 128, 0).num_warps == 1) == (
            rows <= 16
        )


def test_tiles_of_rows_fit_into_registers() -> None:
    for dim in (1, 2, 63, 64, 80, 128, 1000, 1024, 4096, 5120, 8192, MOST_NORM_NUMBERS, 28_672):
        tiles = [activation_tile(dim)]
        if dim <= MOST_NORM_NUMBERS:
            tiles.append(norm_tile(dim))
            assert tiles[-1].padded_dim >= dim
        if dim <= 256:
            tiles.append(rotation_tile(dim))
            assert 2 * tiles[-1].padded_dim >= dim
        for tile in tiles:
            assert tile.padded_dim & (tile.padded_dim - 1) == 0
            of_a_thread = tile.rows * tile.padded_dim // (32 * tile.num_warps)
            # At least a vector of 16 bytes.
            assert 8 <= of_a_thread <= 32
