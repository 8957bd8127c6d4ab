"""Blocks of caches that wait on the host, and their way there and back.

From a GPU they travel on a stream of their own, beside what computes: host memory is pinned, and a
GPU copies all layers in one launch. Events say who waits for whom:

- a copy waits for what was enqueued before it, which wrote the blocks that leave, and may read
  those that blocks come back to;
- what is enqueued after a swap-in waits for it;
- what overwrites blocks that leave waits until they have left, and asks for that (`wait_for`).

On the processor a copy is done when its call returns.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.blocks import swap_blocks

# A cache's first byte on the host is at a multiple of it.
_ALIGNMENT = 512


class Arrival(Protocol):
    """The end of a copy."""

    def hold_compute(self) -> None:
        """What is enqueued for computing from now on waits for it."""


class Lane(Protocol):
    """Where copies run, one after the other, beside what computes."""

    def run(self, copy: Callable[[], None]) -> Arrival:
        """Enqueues a copy, behind what has been enqueued for computing."""


class HostBlocks:
    """Room for blocks of all caches on the host. Ids are int64 on the host."""

    def __init__(self, caches: Sequence[Tensor], num_blocks: int, lane: Lane | None = None) -> None:
        """`caches` are those of the device, contiguous, all on the same one. `lane` is for those
        of a processor, where copies need none."""
        self._caches = tuple(caches)
        self._leaving: list[tuple[frozenset[int], Arrival]] = []
        device = self._caches[0].device
        self._lane: Lane | None = _StreamLane(device) if device.type == "cuda" else lane
        if device.type == "cuda" and num_blocks:
            self.caches, unpin = _pinned_like(self._caches, num_blocks)
            # A process that ends takes its memory along.
            weakref.finalize(self, _release, device, unpin).atexit = False
        else:
            self.caches = _like(self._caches, num_blocks)

    @property
    def is_leaving(self) -> bool:
        """Whether blocks may be on their way to the host."""
        return bool(self._leaving)

    def swap_out(self, device_ids: Tensor, host_ids: Tensor) -> None:
        """Device to host. Before the blocks are written again, `wait_for` them."""
        arrival = self._run(self._caches, self.caches, device_ids, host_ids)
        if arrival is not None:
            self._leaving.append((frozenset(device_ids.tolist()), arrival))

    def swap_in(self, host_ids: Tensor, device_ids: Tensor) -> None:
        """Host to device. What is enqueued from now on finds the blocks there."""
        arrival = self._run(self.caches, self._caches, host_ids, device_ids)
        if arrival is not None:
            arrival.hold_compute()
            # Copies keep their order, so those that left before it have left.
            self._leaving.clear()

    def wait_for(self, device_ids: Iterable[int]) -> None:
        """What is enqueued from now on may write to these blocks."""
        wanted = frozenset(device_ids) if self._leaving else frozenset()
        awaited = [i for i, (ids, _) in enumerate(self._leaving) if ids & wanted]
        if awaited:
            self._leaving[awaited[-1]][1].hold_compute()
            del self._leaving[: awaited[-1] + 1]

    def _run(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_ids: Tensor,
        destination_ids: Tensor,
    ) -> Arrival | None:
        """None if the copy is done."""
        if not len(source_ids):
            return None

        def copy() -> None:
            swap_blocks(sources, destinations, source_ids, destination_ids)

        if self._lane is not None:
            return self._lane.run(copy)
        copy()
        return None


class _StreamLane:
    """A stream of a GPU. What computes is on the current one of whoever calls."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, copy: Callable[[], None]) -> Arrival:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
        return _StreamArrival(self._stream.device, self._stream.record_event())


class _StreamArrival:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def hold_compute(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def _release(device: torch.device, unpin: Callable[[], None]) -> None:
    """Once the last copy is done."""
    torch.cuda.synchronize(device)
    unpin()


def _like(caches: Sequence[Tensor], num_blocks: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(num_blocks, *cache.shape[1:], dtype=cache.dtype) for cache in caches)


def _pinned_like(
    caches: Sequence[Tensor], num_blocks: int
) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """In one piece of memory, which stays pinned until the function is called.

    Not by torch's allocator of pinned memory, which rounds up to a power of two.
    """
    sizes = [-(-num_blocks * cache[0].nbytes // _ALIGNMENT) * _ALIGNMENT for cache in caches]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        raise RuntimeError(f"{memory.nbytes} bytes cannot be pinned: CUDA's error {error}")

    def unpin() -> None:
        runtime.cudaHostUnregister(memory.data_ptr())

    pieces = zip(caches, torch.split(memory, sizes), strict=True)
    return tuple(_shaped(piece, cache, num_blocks) for cache, piece in pieces), unpin


def _shaped(piece: Tensor, cache: Tensor, num_blocks: int) -> Tensor:
    """The begin of a piece of memory as blocks like those of a cache."""
    used = piece[: num_blocks * cache[0].nbytes]
    return used.view(cache.dtype).view(num_blocks, *cache.shape[1:])
