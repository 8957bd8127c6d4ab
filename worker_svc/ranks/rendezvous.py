"""How the ranks of a worker find each other: by the store of torch.distributed, on the host that
starts them or by the variables of torchrun."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from worker_svc.errors import WrongSettingError
from worker_svc.settings import WorkerSettings

VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK: Final = "127.0.0.1"
# Ranks load their shards at their own pace, from their own disks.
LOADING_TIMEOUT: Final = timedelta(hours=1)


@dataclass(frozen=True)
class Place:
    """A rank's place among all, and where the store listens."""

    rank: int
    size: int
    host: str
    port: int
    # Where the agent of torchrun has the store: how often it has started its ranks again.
    restarts: int | None = None

    def store(self, *, is_server: bool = False) -> Store:
        """A new connection to the store, or the store itself."""
        if self.restarts is None:
            return self.listen() if is_server else self._connection(is_server=False)
        # The store outlives the ranks, and so does what they have written.
        return PrefixStore(f"start {self.restarts}", self._connection(is_server=False))

    def listen(self) -> TCPStore:
        """The store itself, of this process, at the port or at any that is free (0).
        WrongSettingError if it cannot listen there."""
        try:
            return self._connection(is_server=True)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise WrongSettingError(
                f"MASTER_ADDR, MASTER_PORT: {self.host}:{self.port} cannot be the ranks' store; "
                f"set an address of rank 0's host and a free port: {reason}"
            ) from error

    def _connection(self, is_server: bool) -> TCPStore:
        return TCPStore(
            self.host, self.port, None, is_server, LOADING_TIMEOUT, wait_for_workers=False
        )

    def interface(self) -> ProcessGroupGloo.Device | None:
        """That of the loopback where all ranks are on this host."""
        if self.host != LOOPBACK:
            return None
        return ProcessGroupGloo.create_device(hostname=LOOPBACK)


def place_of(environment: Mapping[str, str], settings: WorkerSettings) -> Place | None:
    """The place that torchrun's variables name; None without them. WrongSettingError if one is
    missing or wrong, or if they are for another number of ranks."""
    if "RANK" not in environment:
        return None
    missing = [name for name in VARIABLES if name not in environment]
    if missing:
        raise WrongSettingError(f"RANK is set, but not {', '.join(missing)}")
    rank, size, port = (
        _number(name, environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if size != settings.num_ranks:
        raise WrongSettingError(
            f"WORLD_SIZE is {size}, but --tensor-parallel-size times --pipeline-parallel-size is "
            f"{settings.num_ranks}"
        )
    if not 0 <= rank < size:
        raise WrongSettingError(
            f"RANK is {rank}, but WORLD_SIZE is {size}; number the ranks from 0 to {size - 1}"
        )
    if not 0 < port < 2**16:
        raise WrongSettingError(f"MASTER_PORT is {port}; set it to a number from 1 to 65535")
    restarts = None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        name = "TORCHELASTIC_RESTART_COUNT"
        restarts = _number(name, environment.get(name, "0"))
    return Place(rank, size, environment["MASTER_ADDR"], port, restarts)


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise WrongSettingError(f"{name} is {value!r}; set it to a number") from error


def own_place(settings: WorkerSettings) -> Place | None:
    """The place of this process, by `place_of`."""
    return place_of(os.environ, settings)
