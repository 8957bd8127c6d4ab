"""Reads the pools' block maps at a bounded share of Redis' time."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from scheduler_svc.lane.lane import Lane
from scheduler_svc.store.errors import StoreError

log = structlog.get_logger()

# The largest share of time for which a pool's map is read: a read blocks Redis for milliseconds per
# ten thousand blocks.
_MAX_SHARE: Final = 0.02
# After this the status is reported without a map.
TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _CachedMap:
    kinds: bytes
    # Until when the map is reused, by time.monotonic.
    valid_until_s: float


class BlockMaps:
    """The latest map of each pool."""

    def __init__(self) -> None:
        self._cached: dict[int, _CachedMap] = {}
        self._lock = asyncio.Lock()

    async def of(self, lanes: Mapping[int, Lane]) -> dict[int, bytes]:
        """Maps by incarnation, slightly old if reads are slow; without pools that time out."""
        async with self._lock:
            maps = {number: await self._read(number, lane) for number, lane in lanes.items()}
            self._cached = {number: found for number, found in maps.items() if found is not None}
        return {number: found.kinds for number, found in self._cached.items()}

    async def _read(self, incarnation: int, lane: Lane) -> _CachedMap | None:
        cached = self._cached.get(incarnation)
        started_s = time.monotonic()
        if cached is not None and started_s < cached.valid_until_s:
            return cached
        try:
            async with asyncio.timeout(TIMEOUT_S):
                kinds = await lane.pool.block_map()
        except (TimeoutError, StoreError) as error:
            log.warning("no block map", incarnation=f"{incarnation:016x}", reason=repr(error))
            return None
        now_s = time.monotonic()
        return _CachedMap(kinds, now_s + (now_s - started_s) / _MAX_SHARE)
