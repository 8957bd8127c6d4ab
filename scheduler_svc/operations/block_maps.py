"""Block maps, read from the pools without getting in their way."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from scheduler_svc.operations.views import LaneView
from scheduler_svc.store.errors import StoreError

log = structlog.get_logger()

# A pool is looked at for this share of the time at most: meanwhile Redis serves nobody else, for
# milliseconds per ten thousand blocks.
_MAX_SHARE: Final = 0.02
# Redis may be away; the status is then told without a map.
PATIENCE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Look:
    kinds: bytes
    # Until when the next look waits, by the monotonic clock.
    good_until_s: float


class BlockMaps:
    """The latest map of each pool."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}
        self._turn = asyncio.Lock()

    async def of(self, lanes: Mapping[int, LaneView]) -> dict[int, bytes]:
        """Maps by incarnation, a little old where a look is dear; not of pools that are silent."""
        async with self._turn:
            looks = {number: await self._look(number, lane) for number, lane in lanes.items()}
            self._looks = {number: look for number, look in looks.items() if look is not None}
        return {number: look.kinds for number, look in self._looks.items()}

    async def _look(self, incarnation: int, lane: LaneView) -> _Look | None:
        former = self._looks.get(incarnation)
        started_s = time.monotonic()
        if former is not None and started_s < former.good_until_s:
            return former
        try:
            async with asyncio.timeout(PATIENCE_S):
                kinds = await lane.pool.block_map()
        except (TimeoutError, StoreError) as error:
            log.warning("no block map", incarnation=f"{incarnation:016x}", why=repr(error))
            return None
        now_s = time.monotonic()
        return _Look(kinds, now_s + (now_s - started_s) / _MAX_SHARE)
