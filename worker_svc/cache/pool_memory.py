"""Memory of a pool on a CPU, which is zeroed while the model is loaded."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from worker_svc.cache.pool_size import cache_memory, require_host_memory
from worker_svc.service.process import host_memory, lower_priority
from worker_svc.settings import WorkerSettings

# Zeroed at once, after which the thread may stop.
_CHUNK: Final = 2**26
# For the alignment of a pool's tensors.
_SLACK: Final = 2**20
# Below the threads that load the model.
_NICENESS: Final = 10


class PoolMemory:
    """Memory that a thread zeroes, which takes as long as a second and needs no interpreter. At the
    end of the context it is freed, unless a pool has it."""

    def __init__(self, num_bytes: int) -> None:
        """0: nothing is zeroed ahead."""
        self.num_bytes = num_bytes
        self._is_ended = threading.Event()
        self._thread = ThreadPoolExecutor(1, "pool", partial(lower_priority, _NICENESS))
        self._zeroing = self._thread.submit(self._zeros, num_bytes) if num_bytes else None

    @classmethod
    def ahead(cls, settings: WorkerSettings, device: torch.device) -> Self:
        """That of a pool whose size does not depend on the model. Weights that are rounded take
        more memory while they are loaded than afterwards, so the pool comes later.

        WrongSettingError, with both numbers, if the host does not have that much.
        """
        has_size = device.type == "cpu" and settings.num_blocks is None
        if not has_size or settings.quantization is not None:
            return cls(0)
        num_bytes = cache_memory(settings.kv_cache_memory, settings.gpu_memory_utilization, None)
        require_host_memory(num_bytes, settings.swap_space, host_memory())
        return cls(num_bytes + _SLACK)

    def take(self, num_bytes: int) -> Tensor:
        """Uint8 `[num_bytes]`, zeroed: what is there if that suffices, else new memory."""
        zeroing, self._zeroing = self._zeroing, None
        if zeroing is not None and num_bytes <= self.num_bytes:
            return zeroing.result()[:num_bytes]
        del zeroing
        return self._zeros(num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_ended.set()
        self._thread.shutdown()
        self._zeroing = None

    def _zeros(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        for chunk in torch.split(memory, _CHUNK):
            if self._is_ended.is_set():
                break
            # By NumPy, as torch would start threads for it.
            chunk.numpy().fill(0)
        return memory
