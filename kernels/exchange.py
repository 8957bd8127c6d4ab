"""Exchanges tensors between ranks, processes of one host, through memory that they share.

The ranks make the same calls in the same order. A call waits for the others: at first without
giving up its core, then asleep. It fails with RuntimeError if the process of another rank has
ended, or if it has waited for longer than a given time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Implementation

# The types of tensors that are added.
SUM_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_PAGE = 4096
_RANK_BYTES = 128


@dataclass(frozen=True)
class ExchangeSizes:
    """The memory that ranks share. Pages that are not used take no memory."""

    num_ranks: int
    # Of each of a rank's two slots. Larger tensors are exchanged in pieces.
    slot_bytes: int
    # Of the matrix that `columns` are a part of.
    matrix_bytes: int

    @property
    def head_bytes(self) -> int:
        """Before the slots."""
        return -(-self.num_ranks * _RANK_BYTES // _PAGE) * _PAGE

    @property
    def matrix_start(self) -> int:
        return self.head_bytes + 2 * self.num_ranks * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        return self.matrix_start + self.matrix_bytes


@dataclass(frozen=True)
class ExchangeUsage:
    """What exchanges have cost a rank."""

    num_calls: int
    num_bytes: int  # that it wrote, or received as a message
    seconds: float  # in which its threads waited, copied or added


class Exchange:
    """One rank's side. Used by one thread at a time."""

    def __init__(
        self,
        memory: Tensor,
        sizes: ExchangeSizes,
        rank: int,
        processes: Sequence[int],
        timeout_s: float,
        implementation: Implementation,
    ) -> None:
        """`memory` is uint8 `[sizes.num_bytes]`, zeros in the beginning; `processes` has, for each
        rank, a file descriptor of its process (`os.pidfd_open`) or -1. Waits fail after
        `timeout_s`, except those for messages."""
        self.slot_bytes = sizes.slot_bytes
        self._rank = rank
        self._num_ranks = sizes.num_ranks
        self.kernel_object: Any = torch.classes.quire.Exchange(
            memory,
            sizes.head_bytes,
            rank,
            sizes.num_ranks,
            sizes.slot_bytes,
            list(processes),
            timeout_s,
            implementation.isa,
        )
        self._matrix = memory[sizes.matrix_start : sizes.num_bytes].view(torch.float32)
        # To look a method up takes time.
        self._sum, self._broadcast = self.kernel_object.sum, self.kernel_object.broadcast

    def sum(self, part: Tensor) -> Tensor:
        """`sum_reference` of all ranks' parts, which are dense and alike; the same bits on all."""
        out: Tensor = self._sum(part)
        return out

    def broadcast(self, message: Tensor) -> None:
        """Copy the dense tensor of rank 0 to those of all others, which wait for it for any time.
        Rank 0 only waits until the previous exchange is over."""
        self._broadcast(message)

    def columns(self, num_rows: int, width: int) -> Tensor | None:
        """This rank's columns of a float32 matrix `[num_rows, num_ranks * width]`, to be written
        before `gathered`. None if the matrix is too large."""
        whole = self._whole(num_rows, width)
        return None if whole is None else whole.narrow(1, self._rank * width, width)

    def gathered(self, num_rows: int, width: int) -> Tensor:
        """The matrix, on rank 0 when all ranks have written their columns of it. Valid until rank 0
        sends the next message."""
        self.kernel_object.gather(4 * num_rows * width)
        whole = self._whole(num_rows, width)
        assert whole is not None
        return whole

    def take_usage(self) -> ExchangeUsage:
        """That of the time since the last call."""
        num_calls, num_bytes, spent_ns = self.kernel_object.take_usage()
        return ExchangeUsage(num_calls, num_bytes, spent_ns * 1e-9)

    def _whole(self, num_rows: int, width: int) -> Tensor | None:
        num_columns = self._num_ranks * width
        if num_rows * num_columns > len(self._matrix):
            return None
        return self._matrix[: num_rows * num_columns].view(num_rows, num_columns)


def sum_reference(parts: Sequence[Tensor]) -> Tensor:
    """Added in float32 in the order of ranks, and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
