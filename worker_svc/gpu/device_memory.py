"""Use of a GPU's memory, as reported by torch's allocator and the driver."""

import gc
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class MemoryReading:
    """Memory of a GPU at one moment, in bytes."""

    total: int
    free: int  # for any process
    allocated: int  # by torch, in tensors
    reserved: int  # by torch, from the driver
    peak: int  # the most that was allocated since `reset`

    @property
    def non_torch(self) -> int:
        """Held by the driver, libraries and other processes."""
        return self.total - self.free - self.reserved


class MemoryMeter(Protocol):
    """Reads a GPU's memory."""

    def reset(self) -> None:
        """Return memory that torch keeps unused, and reset the peak."""
        ...

    def read(self) -> MemoryReading: ...


class CudaMeter:
    """The statistics of torch's allocator and of the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(
            total=total,
            free=free,
            allocated=torch.cuda.memory_allocated(self._device),
            reserved=torch.cuda.memory_reserved(self._device),
            peak=torch.cuda.max_memory_allocated(self._device),
        )
