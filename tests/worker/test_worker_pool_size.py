"""How many blocks there are: every term, recomputed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from worker_svc.cache.kv_pool import AttentionSpec, block_bytes_of
from worker_svc.cache.pool_size import (
    DeviceMemory,
    bytes_allocated_later,
    cache_memory,
    host_blocks,
    require_capacity,
    require_host_memory,
)
from worker_svc.errors import WrongSettingError
from worker_svc.service.process import host_memory
from worker_svc.sizes import size_text

_MIB, _GIB = 2**20, 2**30
_GPU = DeviceMemory(
    total=80 * _GIB,
    others=5 * _GIB,
    weights=16 * _GIB,
    peak_activations=3 * _GIB,
    non_torch=1 * _GIB,
)


def test_a_block_s_bytes() -> None:
    layers = (AttentionSpec(8, 128, 128, torch.bfloat16),) * 28
    assert block_bytes_of(layers, 16) == 1_835_008


@pytest.mark.parametrize(
    ("asked", "utilization", "memory", "expected"),
    [
        (None, 0.9, None, _GIB),
        (3 * _GIB, 0.9, None, 3 * _GIB),
        (None, 0.9, _GPU, int(80 * _GIB * 0.9) - 20 * _GIB),
        (None, 0.5, _GPU, 20 * _GIB),
        # Limited by free memory.
        (None, 0.95, _GPU, 55 * _GIB),
        # Later allocations reduce free memory, but not the share.
        (None, 0.95, replace(_GPU, allocated_later=2 * _GIB), 53 * _GIB),
        (None, 0.5, replace(_GPU, allocated_later=2 * _GIB), 20 * _GIB),
        # A requested size takes precedence over the utilization.
        (55 * _GIB, 0.5, _GPU, 55 * _GIB),
    ],
)
def test_the_memory_of_the_cache(
    asked: int | None, utilization: float, memory: DeviceMemory | None, expected: int
) -> None:
    assert cache_memory(asked, utilization, memory) == expected


@pytest.mark.parametrize(
    ("asked", "utilization", "words"),
    [
        (
            None,
            0.25,
            ("20 GiB", "0.25", "16 GiB", "3 GiB", "1 GiB", "5 GiB", "--gpu-memory-utilization"),
        ),
        (55 * _GIB + 2**29, 0.9, ("55.5 GiB", "55 GiB", "80 GiB", "--kv-cache-memory")),
    ],
)
def test_what_does_not_fit_on_the_gpu(
    asked: int | None, utilization: float, words: tuple[str, ...]
) -> None:
    with pytest.raises(WrongSettingError) as wrong:
        cache_memory(asked, utilization, _GPU)
    assert all(word in str(wrong.value) for word in words)


def test_memory_allocated_after_the_cache() -> None:
    segments, workspace, granule = 22 * _MIB, 32 * _MIB, 2 * _MIB
    # A quarter of the batch's tokens in three graphs, and logits of 512 rows for 1,000 tokens.
    expected = 20_000 + 2_048_000 + workspace + segments + 3 * granule
    expected += 77 + 6 * granule + segments
    assert bytes_allocated_later(80_000, 2048, (1, 16, 512), 1000, 77, 6) == expected
    # A batch is no larger than the largest one; without graphs there are no logits.
    expected = 80_000 + workspace + segments + granule + segments
    assert bytes_allocated_later(80_000, 100, (512,), 0, 0, 0) == expected
    assert bytes_allocated_later(80_000, 100, (), 1000, 5, 0) == 5 + segments


def test_blocks_of_the_swap_space() -> None:
    assert [host_blocks(size, 1000) for size in (0, 1000, 2999)] == [0, 1, 2]
    with pytest.raises(WrongSettingError, match=r"--swap-space: 999 B .* 1000 B"):
        host_blocks(999, 1000)


def test_the_host_s_memory_holds_its_part() -> None:
    require_host_memory(3 * _GIB, 5 * _GIB, 8 * _GIB)
    with pytest.raises(WrongSettingError, match=r"0 B .* 9 GiB .* 8 GiB; lower --swap-space$"):
        require_host_memory(0, 9 * _GIB, 8 * _GIB)
    with pytest.raises(WrongSettingError, match=r"6 GiB .* 3 GiB .* 8 GiB; lower --kv-cache-mem"):
        require_host_memory(6 * _GIB, 3 * _GIB, 8 * _GIB)


def test_the_host_holds_the_blocks_of_all_its_ranks() -> None:
    require_host_memory(3 * _GIB, 1 * _GIB, 8 * _GIB, num_ranks=2)
    with pytest.raises(WrongSettingError, match=r"3 GiB .* 1 GiB in each of 3 ranks .* 8 GiB"):
        require_host_memory(3 * _GIB, 1 * _GIB, 8 * _GIB, num_ranks=3)


@pytest.mark.parametrize(("text", "limited"), [("4096\n", True), ("max\n", False), (None, False)])
def test_a_container_s_limit_is_its_memory(tmp_path: Path, text: str | None, limited: bool) -> None:
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert (host_memory(tmp_path) == 4096) is limited
    assert host_memory(tmp_path) >= 4096


def test_the_longest_sequence_needs_room() -> None:
    require_capacity(8, 16, 100)
    with pytest.raises(WrongSettingError, match=r"100 tokens needs 7 blocks.* only 6"):
        require_capacity(7, 16, 100)


def test_sizes_for_a_person() -> None:
    sizes: dict[Any, str] = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 * 2**40: "5 TiB"}
    assert {size: size_text(size) for size in sizes} == sizes
