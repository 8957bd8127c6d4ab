"""What a message of a pass takes from rank 0, which sends it, to another rank, which has it.

`python -m benchmarks.ranks.messages PORT` is the other rank.
"""

import subprocess
import sys
import time
from statistics import median
from typing import Final

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroupGloo

from quire.service.logs import configure_logging
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.messages import Kind, Messages

_LOOPBACK: Final = "127.0.0.1"
_NUM_MESSAGES: Final = 200
_WARM_UP: Final = 20
# As between two passes: the other rank may have begun to sleep.
_PAUSE_S: Final = 2e-3
_NUM_BLOCKS: Final = 64  # of a row: 1,024 tokens


def latency_ms(num_rows: int) -> float:
    """The median of messages of steps in which rows decode."""
    store = TCPStore(_LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "benchmarks.ranks.messages", str(store.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        messages = Messages(_group(store, 0).broadcast)
        for _ in range(_NUM_MESSAGES + _WARM_UP):
            time.sleep(_PAUSE_S)
            messages.send(Kind.LOGITS, [_now(), *_arrays(num_rows)])
        printed, _ = other.communicate()
    return float(printed)


def _arrays(num_rows: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    """As many words as those of `Leader.send_pass`."""
    table = np.ones((num_rows, _NUM_BLOCKS), np.int32)
    return [np.ones(num_rows, np.int32) for _ in range(5)] + [table]


def _now() -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """The clock of the system, which all of its processes share, in two words."""
    return np.array([time.monotonic_ns()], np.int64).view(np.int32)


def _group(store: TCPStore, rank: int) -> RankGroup:
    device = ProcessGroupGloo.create_device(hostname=_LOOPBACK)
    group = RankGroup(store, rank, 2, device)
    group.connect()
    return group


def _receive(port: int) -> float:
    messages = Messages(_group(TCPStore(_LOOPBACK, port, None, is_master=False), 1).broadcast)
    took_ns = []
    for _ in range(_NUM_MESSAGES + _WARM_UP):
        sent = messages.receive().arrays[0]
        received_ns = time.monotonic_ns()
        took_ns.append(received_ns - int(np.frombuffer(sent.tobytes(), np.int64)[0]))
    return median(took_ns[_WARM_UP:]) / 1e6


if __name__ == "__main__":
    # Standard output is for the result.
    configure_logging("worker", "error")
    print(_receive(int(sys.argv[1])))
