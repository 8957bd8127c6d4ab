"""Cache blocks that are swapped to the host, and their copies in both directions.

A GPU copies on a separate stream, concurrently with computation: host memory is pinned, and one
launch copies all layers. Events order the copies:

- a copy waits for work that was enqueued before it, which wrote its source blocks and may read its
  destination blocks;
- work that is enqueued after a swap-in waits for it;
- work that overwrites blocks of a swap-out waits for it only after a call of `wait_for`.

On the processor a copy is done when its call returns.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.blocks import swap_blocks

# In bytes, of each cache in the pinned memory.
_ALIGNMENT = 512


class CopyEvent(Protocol):
    """The end of a copy."""

    def make_compute_wait(self) -> None:
        """Make work that is enqueued for computing from now on wait for the copy."""


class CopyStream(Protocol):
    """Runs copies in order, concurrently with computation."""

    def enqueue(self, copy: Callable[[], None]) -> CopyEvent:
        """Enqueue a copy after all work that is enqueued for computing."""


class SwapSpace:
    """Host memory for blocks of all caches. Ids are int64 on the host."""

    def __init__(
        self, caches: Sequence[Tensor], num_blocks: int, stream: CopyStream | None = None
    ) -> None:
        """`caches` are contiguous, on one device. Without a `stream`, a GPU's copies run on one of
        its streams, and a processor's copies run at once."""
        self._caches = tuple(caches)
        self._swap_outs: list[tuple[frozenset[int], CopyEvent]] = []
        device = self._caches[0].device
        self._stream: CopyStream | None = _GpuStream(device) if device.type == "cuda" else stream
        if device.type == "cuda" and num_blocks:
            self.caches, release = _pinned_like(self._caches, num_blocks)
            # A process that exits need not release its memory.
            weakref.finalize(self, release).atexit = False
        else:
            self.caches = _like(self._caches, num_blocks)

    @property
    def is_swapping_out(self) -> bool:
        """Whether a swap-out may be in progress."""
        return bool(self._swap_outs)

    def swap_out(self, device_ids: Tensor, host_ids: Tensor) -> None:
        """Copy device to host. Call `wait_for` before the device blocks are overwritten."""
        event = self._run(self._caches, self.caches, device_ids, host_ids)
        if event is not None:
            self._swap_outs.append((frozenset(device_ids.tolist()), event))

    def swap_in(self, host_ids: Tensor, device_ids: Tensor) -> None:
        """Copy host to device. Work that is enqueued from now on reads the copied blocks."""
        event = self._run(self.caches, self._caches, host_ids, device_ids)
        if event is not None:
            event.make_compute_wait()
            # Copies run in order, so earlier swap-outs end before it.
            self._swap_outs.clear()

    def wait_for(self, device_ids: Iterable[int]) -> None:
        """Let work that is enqueued from now on overwrite these blocks."""
        wanted = frozenset(device_ids) if self._swap_outs else frozenset()
        awaited = [i for i, (ids, _) in enumerate(self._swap_outs) if ids & wanted]
        if awaited:
            self._swap_outs[awaited[-1]][1].make_compute_wait()
            del self._swap_outs[: awaited[-1] + 1]

    def _run(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_ids: Tensor,
        destination_ids: Tensor,
    ) -> CopyEvent | None:
        """Run a copy. Returns None if it is done."""
        if not len(source_ids):
            return None

        def copy() -> None:
            swap_blocks(sources, destinations, source_ids, destination_ids)

        if self._stream is not None:
            return self._stream.enqueue(copy)
        copy()
        return None


class _GpuStream:
    """A stream of a GPU. The caller's current stream is the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enqueue(self, copy: Callable[[], None]) -> CopyEvent:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
        return _GpuEvent(self._stream.device, self._stream.record_event())


class _GpuEvent:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def make_compute_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def _like(caches: Sequence[Tensor], num_blocks: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(num_blocks, *cache.shape[1:], dtype=cache.dtype) for cache in caches)


def _pinned_like(
    caches: Sequence[Tensor], num_blocks: int
) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """Allocate `num_blocks` blocks of every cache in one pinned allocation. Return them, and the
    function that unpins it after the last copy.

    torch's allocator of pinned memory would round up to a power of two.
    """
    device = caches[0].device
    sizes = [-(-num_blocks * cache[0].nbytes // _ALIGNMENT) * _ALIGNMENT for cache in caches]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        raise RuntimeError(f"cannot pin {memory.nbytes} bytes of host memory: CUDA error {error}")

    def release() -> None:
        torch.cuda.synchronize(device)
        runtime.cudaHostUnregister(memory.data_ptr())

    parts = zip(caches, torch.split(memory, sizes), strict=True)
    return tuple(
        part[: num_blocks * cache[0].nbytes].view(cache.dtype).view(num_blocks, *cache.shape[1:])
        for cache, part in parts
    ), release
