"""What stages send each other: hidden states from each to the next, and logits from the last one to
rank 0. Nothing waits for a receiver, so that stages run passes of different rows side by side."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from worker_svc.ranks.send_queue import SendQueue

_STATES_TAG: Final = 4
_LOGITS_TAG: Final = 5
# Where no row samples: rank 0 receives a number when the pass has ended.
_END: Final = (1, 1)


class StageLinks:
    """The links of one rank. Calls have to be in the order of the passes, on one thread."""

    def __init__(
        self,
        processes: Any,
        rank: int,
        num_ranks: int,
        num_stages: int,
        reporting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`processes` is a process group of all ranks. Calls are made within `reporting`."""
        self._processes = processes
        self._rank = rank
        self._width = num_ranks // num_stages
        self._last_stage = range(num_ranks - self._width, num_ranks)
        self._reporting = reporting
        # As many passes as may run at once.
        self._states = SendQueue(num_stages + 1)
        self._logits = SendQueue(num_stages + 1)
        self._receiving = ThreadPoolExecutor(1, "logits")

    @property
    def has_logits(self) -> bool:
        """Whether this is rank 0, which receives them."""
        return self._rank == 0

    def send_states(self, states: Tensor) -> None:
        """To the rank of the next stage with the same index: `[num_tokens, hidden_size]`."""
        # Kernels may use the memory of states again.
        states = states.clone(memory_format=torch.contiguous_format)
        with self._reporting():
            work = self._processes.send([states], self._rank + self._width, _STATES_TAG)
            self._states.add([work], [states])

    def receive_states(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Wait for those of the stage before."""
        states = torch.empty(num_tokens, hidden_size, dtype=dtype)
        with self._reporting():
            self._processes.recv([states], self._rank - self._width, _STATES_TAG).wait()
        return states

    def send_logits(self, part: Tensor) -> None:
        """From a rank of the last stage: float32, the columns of its part of the vocabulary."""
        part = part.contiguous() if len(part) else torch.zeros(_END)
        with self._reporting():
            self._logits.add([self._processes.send([part], 0, _LOGITS_TAG)], [part])

    def receive_logits(self, num_rows: int, num_columns: int) -> Future[Tensor]:
        """On rank 0: float32 `[num_rows, num_columns]`, once the last stage has run the pass."""
        width = -(-num_columns // self._width)
        shape = (num_rows, width) if num_rows else _END
        parts = [torch.empty(shape) for _ in self._last_stage]
        with self._reporting():
            works = [
                self._processes.recv([part], rank, _LOGITS_TAG)
                for rank, part in zip(self._last_stage, parts, strict=True)
            ]
        return self._receiving.submit(self._joined, works, parts, num_rows, num_columns)

    def _joined(
        self, works: Sequence[Any], parts: Sequence[Tensor], num_rows: int, num_columns: int
    ) -> Tensor:
        with self._reporting():
            for work in works:
                work.wait()
        if not num_rows:
            return torch.empty(0, num_columns)
        if len(parts) == 1:
            return parts[0]
        # The last rank's part may go beyond the end of the vocabulary.
        return torch.cat(list(parts), 1)[:, :num_columns].contiguous()
