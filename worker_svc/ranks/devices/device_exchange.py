"""What ranks on GPUs exchange within a pass: sums, logits and input ids, by the NCCL backend of
torch.distributed."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    Store,
)

# While ranks warm up, each compiles its kernels. Once they serve, a pass is watched by
# `PassWatch`.
_TIMEOUT: Final = timedelta(minutes=10)


class DeviceExchange:
    """Exchanges by a backend of torch.distributed. NCCL queues them on the current stream: no call
    waits for the device, and graphs may contain them. All ranks have to make the same calls in the
    same order."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        """The stubs of torch do not have the methods of `backend`."""
        self._backend = backend
        self._is_first = rank == 0
        self._size = size
        self._sum = AllreduceOptions()
        self._gather = AllgatherOptions()
        self._broadcast = BroadcastOptions()
        for options in (self._sum, self._gather, self._broadcast):
            # On the current stream, not on one of the backend's own.
            options.asyncOp = False
        self._broadcast.rootRank = 0
        self._broadcast.rootTensor = 0

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place of `part`, which is contiguous."""
        _complete(self._backend.allreduce([part], self._sum))
        return part

    def gather(self, part: Tensor, num_columns: int) -> Tensor:
        """On rank 0 the columns of all ranks, in their order, without those from `num_columns` on;
        on the others `part`. All parts are contiguous and have the same shape `[n, width]`."""
        if not part.numel():
            return part.new_empty(len(part), num_columns)
        parts = part.new_empty(self._size * len(part), part.shape[1])
        _complete(self._backend._allgather_base(parts, part, self._gather))
        if not self._is_first:
            return part
        rows = parts.view(self._size, *part.shape).transpose(0, 1).reshape(len(part), -1)
        return rows[:, :num_columns].contiguous()

    def broadcast(self, tensor: Tensor) -> None:
        """Replace it by that of rank 0."""
        _complete(self._backend.broadcast([tensor], self._broadcast))


# Called with a store, this rank and the number of ranks, by all ranks at once.
ConnectDevices = Callable[[Store, int, int], DeviceExchange]


def connect_nccl(store: Any, rank: int, size: int) -> DeviceExchange:
    """Connect the current GPUs of all ranks. RuntimeError if that fails."""
    nccl: Any = distributed_c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _TIMEOUT
    # A connection of its own: threads of NCCL use it, and a call that waits would block them.
    own_keys = PrefixStore("nccl", store.clone())
    passes = DeviceExchange(nccl(own_keys, rank, size, options), rank, size)
    # NCCL connects with the first call. Its memory has to be there before the cache is sized.
    passes.sum(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    return passes


def _complete(work: Any) -> None:
    """Gloo waits here; NCCL has queued the work and returns none, or lets the stream wait."""
    if work is not None:
        work.wait()
