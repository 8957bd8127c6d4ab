"""How the ranks of a worker find each other: by the store of torch.distributed, on the host that
starts them or by the variables of torchrun."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroupGloo

from worker_svc.settings import WorkerSettings, WrongSettingError

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
    # The agent of torchrun has the store.
    has_agent: bool = False

    def store(self, *, is_server: bool = False) -> TCPStore:
        """A new connection to the store, or the store itself."""
        return TCPStore(
            self.host,
            self.port,
            None,
            is_server and not self.has_agent,
            LOADING_TIMEOUT,
            wait_for_workers=False,
        )

    def interface(self) -> ProcessGroupGloo.Device | None:
        """That of the loopback where all ranks are on this host."""
        if self.host != LOOPBACK:
            return None
        return ProcessGroupGloo.create_device(hostname=LOOPBACK)


def place_of(environment: Mapping[str, str], settings: WorkerSettings) -> Place | None:
    """That of the variables of torchrun; None without them. WrongSettingError, with both values, if
    they are for another number of ranks."""
    if "RANK" not in environment:
        return None
    missing = [name for name in VARIABLES if name not in environment]
    if missing:
        raise WrongSettingError(f"RANK is set, but not {', '.join(missing)}")
    rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if size != settings.num_ranks:
        raise WrongSettingError(
            f"WORLD_SIZE is {size}, but --tensor-parallel-size times --pipeline-parallel-size is "
            f"{settings.num_ranks}"
        )
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, size, environment["MASTER_ADDR"], port, has_agent)


def own_place(settings: WorkerSettings) -> Place | None:
    """`place_of` this process."""
    return place_of(os.environ, settings)
