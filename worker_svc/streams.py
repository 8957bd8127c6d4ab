"""A device's queue of work, as far as a runner needs it: copies to and fro, and when what was."""

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

_NS_PER_MS = 1e6


class Sent(Protocol):
    """A copy to the device."""

    def wait(self) -> None:
        """Until the source may be written again."""
        ...


class Fetched(Protocol):
    """Copies from the device."""

    def is_ready(self) -> bool: ...

    def arrays(self) -> list[NDArray[Any]]:
        """Waits for them."""
        ...


class Mark(Protocol):
    """A moment on the device: when all that was queued before is done."""

    def ns_until(self, later: Self) -> int:
        """To be asked when the later one has come."""
        ...


class Streams(Protocol):
    """One device's."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8, on the host, zeros."""
        ...

    def send(self, host: Tensor, device: Tensor) -> Sent:
        """Queues a copy behind all work so far."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Copies tensors to the host when all work queued so far is done; what is queued from now
        on does not wait for it."""
        ...

    def mark(self) -> Mark: ...

    def synchronize(self) -> None:
        """Waits for all that is queued."""
        ...


class CudaStreams:
    """Of the current CUDA device, whose current stream has the steps."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, host: Tensor, device: Tensor) -> Sent:
        device.copy_(host, non_blocking=True)
        # Whoever waits sleeps: a plan of many rounds has more copies than there are buffers.
        return _CudaMark(blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        return _CudaFetched(tensors, self._side)

    def mark(self) -> Mark:
        return _CudaMark()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class _CudaMark:
    def __init__(self, *, blocking: bool = False) -> None:
        """A `blocking` one is slept for."""
        self._event: Any = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=True, blocking=blocking
        )
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def ns_until(self, later: Self) -> int:
        elapsed_ms: float = self._event.elapsed_time(later._event)
        return max(0, round(_NS_PER_MS * elapsed_ms))


class _CudaFetched:
    def __init__(self, tensors: Sequence[Tensor], side: torch.cuda.Stream) -> None:
        # Their memory is not to be given to others before the copies are over.
        self._sources = tensors
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._hosts = [_pinned_copy(tensor) for tensor in tensors]
            # The thread sleeps where it waits: it shares its cores with the loop.
            self._over: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._over.record()

    def is_ready(self) -> bool:
        return bool(self._over.query())

    def arrays(self) -> list[NDArray[Any]]:
        self._over.synchronize()
        return [host.numpy() for host in self._hosts]


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
