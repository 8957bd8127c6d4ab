"""One copy per step, from buffers that nobody writes while they are read."""

from dataclasses import dataclass

import numpy as np
import torch
from host_device import HostStreams
from torch import Tensor

from worker_svc.device_inputs import padding_arrays
from worker_svc.device_thread import MOST_LAUNCHED
from worker_svc.staging import ALIGNMENT, Staging, largest_step_bytes, places


@dataclass
class LateCopy:
    """Is made when somebody waits for it, and no sooner."""

    host: Tensor
    device: Tensor
    arrived: list[bytes]
    is_over: bool = False

    def wait(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.arrived.append(bytes(self.host.numpy()))


class LateStreams(HostStreams):
    def __init__(self) -> None:
        self.copies: list[LateCopy] = []
        self.arrived: list[bytes] = []

    def send(self, host: Tensor, device: Tensor) -> LateCopy:  # type: ignore[override]
        self.copies.append(LateCopy(host, device, self.arrived))
        return self.copies[-1]


def test_a_buffer_is_not_written_while_it_is_copied() -> None:
    streams = LateStreams()
    staging = Staging(64, torch.device("cpu"), streams)
    sent = [np.array([number, 7 * number]) for number in range(10)]
    for array in sent:
        staging.send({"values": array})
    assert sum(copy.is_over for copy in streams.copies) == len(sent) - (MOST_LAUNCHED + 1)
    for copy in streams.copies:
        copy.wait()
    assert streams.arrived == [array.tobytes() for array in sent]


def test_arrays_arrive_as_they_are_each_at_an_aligned_place() -> None:
    staging = Staging(1000, torch.device("cpu"), HostStreams())
    arrays = {
        "odd": np.array([1, 2, 3], np.int32),
        "none": np.empty(0, np.int64),
        "floats": np.array([0.5], np.float32),
        "last": np.array([-1, 2**40], np.int64),
    }
    found = staging.send(arrays)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].numpy().dtype == array.dtype
        assert found[name].tolist() == array.tolist()
    assert all(place.offset % ALIGNMENT == 0 for place in places(arrays).values())


def test_the_same_sizes_lie_in_the_same_places() -> None:
    """A graph reads from where it read when it was recorded."""
    staging = Staging(4096, torch.device("cpu"), HostStreams())
    one = staging.send({**padding_arrays(3, 8), "more": np.arange(5)})
    other = staging.send({**padding_arrays(3, 8), "much more": np.arange(99)})
    for name in padding_arrays(3, 8):
        assert one[name].data_ptr() == other[name].data_ptr()


def test_the_largest_step_has_room() -> None:
    max_num_seqs, max_num_tokens, max_blocks = 40, 100, 24
    per_row = {name: np.empty(max_num_seqs, np.int64) for name in "abcdef"}
    floats = {name: np.empty(max_num_seqs, np.float32) for name in "xyz"}
    changes = max_num_seqs * max_blocks
    for arrays in (padding_arrays(0, 48), padding_arrays(0, max_num_tokens)):
        step = {
            **arrays,
            **per_row,
            **floats,
            "table_indices": np.empty(changes, np.int64),
            "block_ids": np.empty(changes, np.int32),
        }
        end = max(place.end for place in places(step).values())
        assert end <= largest_step_bytes(max_num_seqs, max_num_tokens, max_blocks)
