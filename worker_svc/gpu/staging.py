"""One copy to the device per step, from host buffers that no pending copy reads."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.gpu.device_inputs import BlockChanges, ForwardInputs, PromptInputs, SamplingInputs
from worker_svc.gpu.streams import Event, Streams
from worker_svc.runner.device_thread import MAX_IN_FLIGHT

# Kernels read whole vectors where an address allows it.
ALIGNMENT: Final = 16
# The most rows by which a graph is larger than its batch.
_MOST_PADDING: Final = 16
_DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


@dataclass(frozen=True)
class Region:
    """The place of an array in a buffer of bytes."""

    offset: int
    length: int
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        return self.offset + self.length * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.end].view(_DTYPES[self.dtype])


def layout(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Region]:
    """Place arrays one after another, in their order."""
    found: dict[str, Region] = {}
    offset = 0
    for name, array in arrays.items():
        found[name] = Region(offset, len(array), array.dtype)
        offset = -(-found[name].end // ALIGNMENT) * ALIGNMENT
    return found


def largest_step_bytes(max_num_seqs: int, max_num_tokens: int, max_blocks: int) -> int:
    """An upper bound of a step's arrays: all rows sample, and all their blocks are new."""
    num_rows = max_num_seqs + _MOST_PADDING
    num_tokens = max(max_num_tokens, num_rows)
    per_token = len(fields(ForwardInputs)) + len(fields(PromptInputs))
    of_sampling = len(fields(SamplingInputs))
    num_arrays = per_token + of_sampling + len(fields(BlockChanges))
    entries = per_token * num_tokens + of_sampling * num_rows
    # Entries have up to 8 bytes; those of `BlockChanges` have 8 and 4.
    return 8 * entries + (8 + 4) * num_rows * max_blocks + num_arrays * ALIGNMENT


class Staging:
    """Host buffers used in rotation, and the device buffer to which they are copied.

    The device buffer keeps its address, so graphs can read it: copies and passes are in one stream.
    A host buffer is written again when its copy is done.
    """

    def __init__(self, num_bytes: int, device: torch.device, streams: Streams) -> None:
        """`num_bytes` is the size of the largest step."""
        self._streams = streams
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [streams.host_buffer(num_bytes) for _ in range(MAX_IN_FLIGHT + 1)]
        self._copied: list[Event | None] = [None] * len(self._hosts)
        self._next = 0

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """The arrays as tensors on the device, until the next call."""
        index = self._next
        self._next = (index + 1) % len(self._hosts)
        if (copied := self._copied[index]) is not None:
            copied.wait()
        host, found = self._hosts[index], layout(arrays)
        values = host.numpy()
        for name, region in found.items():
            values[region.offset : region.end].view(region.dtype)[:] = arrays[name]
        end = max((region.end for region in found.values()), default=0)
        self._copied[index] = self._streams.send(host[:end], self._device[:end])
        return self.tensors(found)

    def tensors(self, found: Mapping[str, Region]) -> dict[str, Tensor]:
        """The regions of the device buffer."""
        return {name: region.view(self._device) for name, region in found.items()}
