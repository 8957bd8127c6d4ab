"""Blocks that are swapped to the host and back are intact, and not overwritten during a copy."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from triton_devices import DEVICES

from kernels.swap_space import SwapSpace


@dataclass
class DeferredStream:
    """Runs a copy only when work waits for it."""

    copies: list[Callable[[], None]] = field(default_factory=list)
    num_run: int = 0

    def enqueue(self, copy: Callable[[], None]) -> "DeferredEvent":
        self.copies.append(copy)
        return DeferredEvent(self, len(self.copies))


@dataclass
class DeferredEvent:
    stream: DeferredStream
    num_copies: int

    def make_compute_wait(self) -> None:
        for copy in self.stream.copies[self.stream.num_run : self.num_copies]:
            copy()
        self.stream.num_run = max(self.stream.num_run, self.num_copies)


def layers(num_blocks: int = 6) -> list[torch.Tensor]:
    """Every number of block b is b."""
    blocks = torch.arange(num_blocks, dtype=torch.float32).view(-1, 1, 1, 1)
    return [blocks.expand(-1, 2, 2, dim).contiguous() for dim in (3, 8)]


def ids(*block_ids: int) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64)


def numbers(caches: list[torch.Tensor], block: int) -> set[float]:
    return {number for cache in caches for number in cache[block].unique().tolist()}


def test_blocks_go_and_come_back() -> None:
    caches = layers()
    host = SwapSpace(caches, 3)
    host.swap_out(ids(4, 1), ids(0, 2))
    assert not host.is_swapping_out
    for cache in caches:
        cache.fill_(9)
    host.swap_in(ids(2, 0), ids(5, 3))
    assert [numbers(caches, block) for block in (5, 3, 1)] == [{1}, {4}, {9}]


def test_a_block_is_not_overwritten_before_it_has_left() -> None:
    caches, stream = layers(), DeferredStream()
    host = SwapSpace(caches, 4, stream)
    host.swap_out(ids(1, 2), ids(0, 1))
    host.swap_out(ids(3), ids(2))
    host.swap_out(ids(4), ids(3))
    assert host.is_swapping_out
    host.wait_for([5])
    assert stream.num_run == 0
    # The last of those that leave is waited for; what left before it has left, too.
    host.wait_for([3, 5])
    assert stream.num_run == 2
    assert [numbers(list(host.caches), block) for block in range(3)] == [{1}, {2}, {3}]
    host.wait_for([1, 2, 3])
    assert stream.num_run == 2
    host.wait_for([4])
    assert stream.num_run == 3
    assert not host.is_swapping_out


def test_blocks_that_come_back_are_there_for_what_follows() -> None:
    caches, stream = layers(), DeferredStream()
    host = SwapSpace(caches, 2, stream)
    host.swap_out(ids(1), ids(1))
    host.swap_in(ids(1), ids(4))
    assert stream.num_run == 2
    assert numbers(caches, 4) == {1}
    assert not host.is_swapping_out


def test_nothing_to_move_takes_no_copy() -> None:
    stream = DeferredStream()
    host = SwapSpace(layers(), 0, stream)
    host.swap_out(ids(), ids())
    host.swap_in(ids(), ids())
    assert not stream.copies
    assert not host.is_swapping_out


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_leave_a_gpu_while_it_computes(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(64, 16, 8, 128), (64, 16, 8, 72)] * 14
    caches = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    before = [cache.cpu() for cache in caches]
    host = SwapSpace(caches, 48)
    assert all(cache.is_pinned() for cache in host.caches)
    work = torch.randn(4096, 4096, device=device)
    for attempt in range(4):
        swapped = torch.randperm(64)[:48]
        host.swap_out(swapped, torch.arange(48))
        for _ in range(20):
            work = (work @ work).tanh()
        host.wait_for(swapped.tolist())
        for cache in caches:
            cache.view(torch.uint8)[swapped] = 0
        places = swapped if attempt == 3 else swapped.flip(0)
        host.swap_in(torch.arange(48), places)
        found = [cache.cpu() for cache in caches]
        for one, other in zip(found, before, strict=True):
            assert torch.equal(bits(one[places]), bits(other[swapped]))
        before = found


@pytest.mark.parametrize("device", DEVICES[1:])
def test_memory_that_is_given_back_can_be_pinned_again(device: str) -> None:
    caches = [torch.zeros(4, 16, 2, 64, device=device)]
    for _ in range(3):
        host = SwapSpace(caches, 1000)
        host.swap_out(ids(1), ids(999))
        del host


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
