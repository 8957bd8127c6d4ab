"""What metrics and status read of the engine and its lanes."""

from collections.abc import Mapping, Sized
from typing import Protocol

from scheduler_svc.core.stats import EngineStats, LaneStats


class WorkerView(Protocol):
    """What a worker said of itself."""

    @property
    def incarnation(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...  # the null block included


class PoolView(Protocol):
    async def block_map(self) -> bytes:
        """As operations.proto has it; empty where there is no pool. StoreError if it cannot."""
        ...


class LaneView(Protocol):
    """One worker's lane."""

    @property
    def worker(self) -> WorkerView: ...
    @property
    def pool(self) -> PoolView: ...
    @property
    def address(self) -> str: ...
    @property
    def draining(self) -> bool: ...
    @property
    def stats(self) -> LaneStats: ...
    @property
    def num_free_blocks(self) -> int: ...

    # Sequences that have a row, that wait for one here, and whose blocks are in host memory.
    @property
    def rows(self) -> Sized: ...
    @property
    def assigned(self) -> Sized: ...
    @property
    def num_swapped(self) -> int: ...

    async def reset_prefix_cache(self) -> int:
        """How many blocks lost their hash; waits while Redis is away."""
        ...


class QueueView(Sized, Protocol):
    """The requests that no lane has been chosen for."""

    @property
    def num_tokens(self) -> int: ...


class EngineView(Protocol):
    @property
    def lanes(self) -> Mapping[int, LaneView]: ...
    @property
    def waiting(self) -> QueueView: ...
    @property
    def stats(self) -> EngineStats: ...
