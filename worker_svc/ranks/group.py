"""Communication between the ranks of a worker: through shared memory where all are on one host, and
by torch.distributed's Gloo backend. What GPUs exchange goes by `device_exchange`.

Ranks are numbered stage by stage: rank = stage * ranks of a stage + index in the stage.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NoReturn

import structlog
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from kernels.exchange import SUM_DTYPES, Exchange
from worker_svc.model.shards.shard import Shard
from worker_svc.ranks.devices.device_exchange import ConnectDevices, DeviceExchange
from worker_svc.ranks.send_queue import SendQueue
from worker_svc.ranks.shared_memory import share_memory
from worker_svc.ranks.stage_links import StageLinks

log = structlog.get_logger()

# The status of a process that lost another rank. That of a worker whose device is lost.
RANK_LOST: Final = 3
_SUM_TAG: Final = 1
_GATHER_TAG: Final = 2
_MESSAGE_TAG: Final = 3
# Ranks run a pass side by side, so one never waits long for another within a pass.
_PASS_TIMEOUT: Final = timedelta(seconds=60)
# For the next pass they wait as long as there is no request.
_IDLE_TIMEOUT: Final = timedelta(days=365)
# A stage waits for all of the pass of the one before it.
_STAGE_TIMEOUT: Final = timedelta(minutes=10)
# Messages that followers have not received yet: some for each pass, and block moves.
_MOST_MESSAGES: Final = 32


def end_process(reason: str) -> NoReturn:
    """End this process: ranks that are out of step cannot run another pass."""
    log.critical("a rank is lost", reason=reason)
    os._exit(RANK_LOST)


class RankGroup:
    """All ranks of a worker, as one of them sees them. Used by one thread at a time; all ranks have
    to make the same calls in the same order."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: ProcessGroupGloo.Device | None = None,
        on_lost: Callable[[str], object] = end_process,
        num_stages: int = 1,
    ) -> None:
        """`device` is the network interface, by default the one of the host's name or of
        GLOO_SOCKET_IFNAME. `on_lost` is called with the reason when a call fails. All stages have
        as many ranks."""
        self.rank = rank
        self.size = size
        self.store = store
        self._on_lost = on_lost
        self._device = device
        # None on CPUs.
        self._on_devices: DeviceExchange | None = None
        # None before the ranks connect, and where they are on several hosts.
        self.shared: Exchange | None = None
        self._passes: Any = None
        self._messages: Any = None
        self._is_power_of_two = size & (size - 1) == 0
        self._sum = AllreduceOptions()
        self._smallest = AllreduceOptions()
        self._smallest.reduceOp = ReduceOp(ReduceOp.MIN)
        self._largest = AllreduceOptions()
        self._largest.reduceOp = ReduceOp(ReduceOp.MAX)
        self.num_stages = num_stages
        # The ranks that have parts of the same layers, as a group.
        self.of_stage = self if num_stages == 1 else self._of_stage()
        self.links: StageLinks | None = None  # once connected, if there are several stages
        self._sent_messages = SendQueue(_MOST_MESSAGES)

    def connect(self, connect_devices: ConnectDevices | None = None) -> None:
        """Wait until all ranks are here. Before, a rank can only `exchange`, for which the store
        waits: ranks may start and load minutes apart. `connect_devices` connects their GPUs, for
        exchanges within passes."""
        self.exchange("connecting", True)
        place = (self.rank, self.size)
        with self._reporting():
            self._passes = _connect(self.store, "passes", *place, _PASS_TIMEOUT, self._device)
            if connect_devices is not None:
                self._on_devices = connect_devices(self.store, *place)
            elif self.num_stages == 1:
                self.shared = share_memory(*place, self.exchange, _PASS_TIMEOUT.total_seconds())
            if self.shared is None:
                self._messages = _connect(
                    self.store, "messages", *place, _IDLE_TIMEOUT, self._device
                )
        if self.num_stages > 1:
            self._connect_stages()

    def _connect_stages(self) -> None:
        if self.of_stage.size > 1:
            self.of_stage.connect()
        place = (self.rank, self.size)
        with self._reporting():
            links = _connect(self.store, "stages", *place, _STAGE_TIMEOUT, self._device)
        self.links = StageLinks(links, *place, self.num_stages, self._reporting)

    def _of_stage(self) -> "RankGroup":
        width = self.size // self.num_stages
        own_keys = PrefixStore(f"stage {self.stage}", self.store)
        return RankGroup(own_keys, self.rank % width, width, self._device, self._on_lost)

    @property
    def stage(self) -> int:
        return self.rank * self.num_stages // self.size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def shard(self) -> Shard:
        return Shard(self.of_stage.rank, self.of_stage.size)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, bitwise equal on all of them; `part` may be overwritten.

        Without shared memory by recursive doubling (Thakur, Rabenseifner and Gropp, 2005): in step
        k a rank exchanges its sum with that of the rank whose number differs in bit k. Gloo's own
        algorithm, which is used for other numbers of ranks, takes two to three times as long for
        the small tensors of decode steps.
        """
        part = part.contiguous()
        if self._on_devices is not None:
            return self._on_devices.sum(part)
        with self._reporting():
            if self.shared is not None and part.dtype in SUM_DTYPES:
                return self.shared.sum(part)
            if not self._is_power_of_two:
                self._passes.allreduce([part], self._sum).wait()
                return part
            distance = 1
            while distance < self.size:
                part = self._add(part, self.rank ^ distance)
                distance *= 2
        return part

    def _add(self, part: Tensor, other: int) -> Tensor:
        """The sum of this rank's tensor and that of another one, which does the same."""
        received = torch.empty_like(part)
        sending = self._passes.send([part], other, _SUM_TAG)
        self._passes.recv([received], other, _SUM_TAG).wait()
        sending.wait()
        return received.add_(part)

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """Each the least of all ranks."""
        values = torch.tensor(numbers)
        with self._reporting():
            self._passes.allreduce([values], self._smallest).wait()
        return [int(value) for value in values]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Each the greatest of all ranks, in double precision."""
        values = torch.tensor(numbers, dtype=torch.float64)
        with self._reporting():
            self._passes.allreduce([values], self._largest).wait()
        return [float(value) for value in values]

    def columns(self, num_rows: int, width: int) -> Tensor | None:
        """`Exchange.columns`; None also without shared memory."""
        return None if self.shared is None else self.shared.columns(num_rows, width)

    def gathered(self, columns: Tensor, num_columns: int) -> Tensor:
        """On rank 0 the first columns of the matrix, when all ranks have written theirs; on the
        others their own. Valid until the next message."""
        assert self.shared is not None
        with self._reporting():
            whole = self.shared.gathered(*columns.shape)
        return whole[:, :num_columns].contiguous() if self.is_first else columns

    def gather(self, part: Tensor, num_columns: int) -> Tensor:
        """On rank 0 the columns of all ranks, in their order, without those from `num_columns` on;
        on the others `part`. All parts have the same shape `[n, width]`."""
        part = part.contiguous()
        if self._on_devices is not None:
            return self._on_devices.gather(part, num_columns)
        with self._reporting():
            if not self.is_first:
                self._passes.send([part], 0, _GATHER_TAG).wait()
                return part
            parts = [torch.empty_like(part) for _ in range(1, self.size)]
            receiving = [
                self._passes.recv([one], rank, _GATHER_TAG) for rank, one in enumerate(parts, 1)
            ]
            gathered = part.new_empty(len(part), num_columns)
            columns = torch.split(gathered, part.shape[1], 1)
            columns[0].copy_(part[:, : columns[0].shape[1]])
            for rank, found in enumerate(columns[1:], 1):
                receiving[rank - 1].wait()
                found.copy_(parts[rank - 1][:, : found.shape[1]])
            for one in receiving[len(columns) - 1 :]:
                one.wait()
        return gathered

    def share(self, ids: Tensor) -> None:
        """Replace a tensor on the device by that of rank 0, within a pass."""
        assert self._on_devices is not None
        self._on_devices.broadcast(ids)

    def broadcast(self, parts: Sequence[Tensor]) -> None:
        """Copy the tensors of rank 0, which may come at any time, to all others. These may receive
        one part after the other. Sends are faster than Gloo's broadcast for so few ranks, and the
        second part follows the first without a pause."""
        messages = self._messages
        with self._reporting():
            if self.shared is not None:
                for part in parts:
                    self.shared.broadcast(part)
                return
            if self.is_first:
                others = range(1, self.size)
                if self.num_stages > 1:
                    # The ranks of later stages are busy with earlier passes.
                    parts = [part.clone() for part in parts]
                works = [
                    messages.send([one], rank, _MESSAGE_TAG) for one in parts for rank in others
                ]
                if self.num_stages > 1:
                    self._sent_messages.add(works, parts)
                    return
            else:
                works = [messages.recv([one], 0, _MESSAGE_TAG) for one in parts]
            for work in works:
                work.wait()

    def flush(self) -> None:
        """Wait until all messages are received."""
        with self._reporting():
            self._sent_messages.flush()

    def exchange(self, name: str, own: Any) -> list[Any]:
        """What each rank gives, a value of JSON, by rank. Under one name once."""
        with self._reporting():
            self.exchange_own(name, own)
            return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.size)]

    def exchange_own(self, name: str, own: Any) -> None:
        """Give something without waiting for the others."""
        self.store.set(f"{name}/{self.rank}", json.dumps(own))

    def has_given(self, name: str) -> bool:
        """Whether this rank has given something under a name."""
        return bool(self.store.check([f"{name}/{self.rank}"]))

    def lost(self, reason: str) -> None:
        """Report that the ranks are out of step."""
        self._on_lost(reason)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._on_lost(str(error))
            raise


def _connect(
    store: Store,
    name: str,
    rank: int,
    size: int,
    timeout: timedelta,
    device: ProcessGroupGloo.Device | None,
) -> Any:
    """A process group, whose methods the stubs of torch do not have."""
    own_keys = PrefixStore(name, store)
    if device is None:
        return ProcessGroupGloo(own_keys, rank, size, timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timeout
    options._threads = 1
    return ProcessGroupGloo(own_keys, rank, size, options)
