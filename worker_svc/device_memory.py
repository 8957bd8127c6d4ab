"""What a GPU's memory is taken by, as torch's allocator and the driver say."""

import gc
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class MemoryReading:
    """Bytes of a GPU at one moment."""

    total: int
    free: int  # of all processes together
    allocated: int  # by torch, in tensors
    reserved: int  # by torch, from the driver
    peak: int  # the most that was allocated since the restart

    @property
    def beside_torch(self) -> int:
        """What the driver, libraries and other processes have."""
        return self.total - self.free - self.reserved


class MemoryMeter(Protocol):
    """Where readings come from."""

    def restart(self) -> None:
        """Gives back what torch keeps unused, and begins a new peak."""
        ...

    def read(self) -> MemoryReading: ...


class CudaMeter:
    """The statistics of torch's own allocator, and the driver's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> None:
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
