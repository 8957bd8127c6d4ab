"""Ranks as threads of one process, with the real backend between them."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed import HashStore, ProcessGroupGloo

from worker_svc.ranks.devices.device_exchange import ConnectDevices
from worker_svc.ranks.group import RankGroup

T = TypeVar("T")
LOOPBACK = "127.0.0.1"


def _raise(reason: str) -> None:
    raise AssertionError(f"a rank is lost: {reason}")


class RankThreads:
    """Groups of all ranks, and a thread for each."""

    def __init__(
        self,
        num_ranks: int,
        threads: ThreadPoolExecutor,
        num_stages: int,
        connect_devices: ConnectDevices | None,
    ) -> None:
        self._threads = threads
        store = HashStore()
        device = ProcessGroupGloo.create_device(hostname=LOOPBACK)
        self.groups = [
            RankGroup(store, rank, num_ranks, device, on_lost=_raise, num_stages=num_stages)
            for rank in range(num_ranks)
        ]
        self.run(lambda rank: self.groups[rank].connect(connect_devices))

    def run(self, call: Callable[[int], T]) -> Sequence[T]:
        """What the call gives on each rank."""
        return list(self._threads.map(call, range(len(self.groups)), timeout=60))


@contextmanager
def rank_threads(
    num_ranks: int, num_stages: int = 1, connect_devices: ConnectDevices | None = None
) -> Iterator[RankThreads]:
    with ThreadPoolExecutor(num_ranks) as threads:
        yield RankThreads(num_ranks, threads, num_stages, connect_devices)
