"""Work queued on a device: copies in both directions, and events."""

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

_NS_PER_MS = 1e6


class Event(Protocol):
    """A point in the queue, as a CUDA event."""

    def wait(self) -> None:
        """Until all work queued before it is done."""
        ...

    def elapsed_ns(self, end: Self) -> int:
        """The time to a later event, which must be done."""
        ...


class PendingCopies(Protocol):
    """Copies from the device."""

    def is_ready(self) -> bool: ...

    def arrays(self) -> list[NDArray[Any]]:
        """Wait for the copies."""
        ...


class Streams(Protocol):
    """The queues of one device."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Zeros on the host, uint8, pinned where the device needs it."""
        ...

    def send(self, host: Tensor, device: Tensor) -> Event:
        """Queue a copy after all work so far. `host` may be written again after the event."""
        ...

    def upload(self, array: NDArray[Any], device: torch.device) -> Tensor:
        """The array on the device, copied after all work so far. It may be changed afterwards."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> PendingCopies:
        """Copy tensors to the host after all work queued so far. Work that is queued later does
        not wait for the copies."""
        ...

    def record_event(self) -> Event: ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...


class CudaStreams:
    """The current CUDA device: steps are in the caller's current stream, copies to the host in
    another."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device()

    @property
    def _current(self) -> torch.cuda.Stream:
        # Without an index torch first finds out the current device, which takes most of the time of
        # this call. A step makes six of them.
        return torch.cuda.current_stream(self._device)

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, host: Tensor, device: Tensor) -> Event:
        device.copy_(host, non_blocking=True)
        # A blocking event, because a plan of many rounds has more copies than there are buffers
        # and waits for them here.
        return _CudaEvent(self._current, blocking=True)

    def upload(self, array: NDArray[Any], device: torch.device) -> Tensor:
        # The allocator of pinned memory keeps it until the copy is done.
        return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> PendingCopies:
        return _CudaCopies(tensors, self._current, self._side)

    def record_event(self) -> Event:
        return _CudaEvent(self._current)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, *, blocking: bool = False) -> None:
        """Record it in a stream. `blocking`: `wait` sleeps instead of spinning."""
        self._event: Any = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=True, blocking=blocking
        )
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def elapsed_ns(self, end: Self) -> int:
        elapsed_ms: float = self._event.elapsed_time(end._event)
        return max(0, round(_NS_PER_MS * elapsed_ms))


class _CudaCopies:
    def __init__(
        self, tensors: Sequence[Tensor], current: torch.cuda.Stream, side: torch.cuda.Stream
    ) -> None:
        # Their memory must not be reused before the copies are done.
        self._sources = tensors
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._hosts = [_pinned_copy(tensor) for tensor in tensors]
            # A blocking event: the thread shares its cores with the event loop.
            self._done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._done.record(side)

    def is_ready(self) -> bool:
        return bool(self._done.query())

    def arrays(self) -> list[NDArray[Any]]:
        self._done.synchronize()
        return [host.numpy() for host in self._hosts]


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
