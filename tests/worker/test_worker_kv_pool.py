"""Blocks of a pool: their memory, and moves, on a processor and on a GPU."""

import ctypes
import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from triton_devices import DEVICES

from worker_svc.cache import kv_pool
from worker_svc.cache.kv_pool import AttentionSpec, KvPool, PoolSize
from worker_svc.plan.plans import BlockMoves, PlanError

_BLOCK_SIZE = 4
_LAYERS = (AttentionSpec(2, 8, 16, torch.float32), AttentionSpec(1, 24, 8, torch.float32))


@pytest.fixture(params=DEVICES)
def pool(request: pytest.FixtureRequest) -> KvPool:
    """Every number of block b is b."""
    pool = KvPool(_LAYERS, PoolSize(8, 3), _BLOCK_SIZE, torch.device(request.param))
    for cache in (cache for layer in pool.layers for cache in layer):
        cache.copy_(torch.arange(8).view(-1, 1, 1, 1))
    return pool


def moves(*pairs: tuple[int, int]) -> BlockMoves:
    ids = np.array(pairs, np.int64).reshape(-1, 2)
    return BlockMoves(ids[:, 0].copy(), ids[:, 1].copy())


def numbers(pool: KvPool) -> list[int]:
    """Of every block; -1 if its numbers differ."""
    blocks = [cache.flatten(1).cpu() for layer in pool.layers for cache in layer]
    joined = torch.cat(blocks, 1)
    same = (joined == joined[:, :1]).all(1)
    return torch.where(same, joined[:, 0], -1).long().tolist()


def overwrite(pool: KvPool, block: int) -> None:
    """As a step does it."""
    slots = np.arange(block * _BLOCK_SIZE, (block + 1) * _BLOCK_SIZE)
    pool.wait_for_swap_outs(np.append(slots, -1))
    for cache in (cache for layer in pool.layers for cache in layer):
        cache[block] = 99


def num_absent_pages(tensor: torch.Tensor) -> int:
    """Pages wholly within the tensor that the system has yet to find memory for."""
    end = tensor.data_ptr() + tensor.nbytes
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * ((end - first) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(len(pages) * mmap.PAGESIZE)
    assert libc.mincore(ctypes.c_void_p(first), length, pages) == 0, ctypes.get_errno()
    return sum(not page & 1 for page in pages)


def test_memory_is_allocated_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[torch.Tensor] = []

    def untouched_cache(*shape_and_types: Any) -> torch.Tensor:
        """Memory without contents."""
        *shape, dtype, _ = shape_and_types
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        caches.append(torch.frombuffer(memory, dtype=dtype).view(*shape))
        assert num_absent_pages(caches[-1]) == len(memory) // mmap.PAGESIZE
        return caches[-1]

    monkeypatch.setattr(kv_pool, "empty_cache", untouched_cache)
    layers = (
        AttentionSpec(4, 64, 64, torch.float32),
        AttentionSpec(4, 64, 64, torch.float8_e4m3fn),
    )
    KvPool(layers, PoolSize(256, 0), 16, torch.device("cpu"))
    assert [num_absent_pages(cache) for cache in caches] == [0] * 4


def test_blocks_leave_are_overwritten_and_come_back_elsewhere(pool: KvPool) -> None:
    nothing = moves()
    for _ in range(3):
        pool.move(moves((2, 0), (5, 2)), nothing, nothing)
        overwrite(pool, 5)
        overwrite(pool, 2)
        pool.move(nothing, moves((0, 2), (2, 5)), nothing)
        assert numbers(pool) == list(range(8))
    pool.move(moves((3, 1)), nothing, nothing)
    pool.move(nothing, moves((1, 6)), nothing)
    assert numbers(pool) == [0, 1, 2, 3, 4, 5, 3, 7]


def test_a_block_that_leaves_may_be_copied_over_in_the_same_plan(pool: KvPool) -> None:
    pool.move(moves((2, 0)), moves(), moves((4, 2), (2, 3)))
    assert numbers(pool) == [0, 1, 4, 2, 4, 5, 6, 7]
    pool.move(moves(), moves((0, 7)), moves())
    assert numbers(pool) == [0, 1, 4, 2, 4, 5, 6, 2]


def test_blocks_that_are_not_there_are_refused_before_any_is_moved(pool: KvPool) -> None:
    for wrong in (
        (moves((0, 0)), moves(), moves()),
        (moves((1, 3)), moves(), moves()),
        (moves(), moves((0, 8)), moves()),
        (moves(), moves(), moves((1, 2), (8, 3))),
        (moves((1, 0)), moves((0, 1)), moves()),
    ):
        with pytest.raises(PlanError):
            pool.move(*wrong)
    assert numbers(pool) == list(range(8))
