"""One copy to the device per step, from buffers that no copy in flight reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device_thread import MOST_LAUNCHED
from worker_svc.streams import Sent, Streams

# Kernels read whole vectors where an address allows it.
ALIGNMENT: Final = 16
# Of what `worker_svc.device_inputs` sends.
_NUM_ARRAYS: Final = 17
_INTS_PER_TOKEN, _INTS_PER_ROW, _FLOATS_PER_ROW = 3, 9, 3
# Rows by which a graph may be larger than a batch.
_MOST_PADDING: Final = 16
_DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


@dataclass(frozen=True)
class Place:
    """Where an array lies in a buffer of bytes."""

    offset: int
    length: int
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        return self.offset + self.length * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.end].view(_DTYPES[self.dtype])


def places(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Place]:
    """One behind the other, in their order."""
    found: dict[str, Place] = {}
    offset = 0
    for name, array in arrays.items():
        found[name] = Place(offset, len(array), array.dtype)
        offset = -(-found[name].end // ALIGNMENT) * ALIGNMENT
    return found


def largest_step_bytes(max_num_seqs: int, max_num_tokens: int, max_blocks: int) -> int:
    """What the arrays of any step take at most: all rows sample, and all their blocks are new."""
    num_rows = max_num_seqs + _MOST_PADDING
    num_tokens = max(max_num_tokens, num_rows)
    per_row = _INTS_PER_ROW * 8 + _FLOATS_PER_ROW * 4 + max_blocks * (8 + 4)
    unaligned = _INTS_PER_TOKEN * 8 * num_tokens + per_row * num_rows
    return unaligned + _NUM_ARRAYS * ALIGNMENT


class Staging:
    """Host buffers that take turns, and the one on the device that they are copied to.

    The device's buffer never moves, so that a graph may read it: the device itself keeps the order
    of copies and passes. A host buffer is written again when its copy is over.
    """

    def __init__(self, num_bytes: int, device: torch.device, streams: Streams) -> None:
        """`num_bytes` is what the largest step takes."""
        self._streams = streams
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [streams.host_buffer(num_bytes) for _ in range(MOST_LAUNCHED + 1)]
        self._sent: list[Sent | None] = [None] * len(self._hosts)
        self._turn = 0

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """The arrays as tensors on the device, until the next call."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._hosts)
        if (sent := self._sent[turn]) is not None:
            sent.wait()
        host, found = self._hosts[turn], places(arrays)
        values = host.numpy()
        for name, place in found.items():
            values[place.offset : place.end].view(place.dtype)[:] = arrays[name]
        end = max((place.end for place in found.values()), default=0)
        self._sent[turn] = self._streams.send(host[:end], self._device[:end])
        return self.tensors(found)

    def tensors(self, found: Mapping[str, Place]) -> dict[str, Tensor]:
        """What lies in those places on the device."""
        return {name: place.of(self._device) for name, place in found.items()}
