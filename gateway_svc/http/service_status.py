"""The state of the service for the page: the leaders' statuses, read at most once a second."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from gateway_svc.scheduler.shards import Shards, ShardStatus
from quire.internal.v1.operations_pb2 import WorkerStatus

_INTERVAL_S = 1.0
# Cells of a worker's block map.
_MAX_CELLS = 480
# By the kind of a block in the map. A cell has the first kind that any of its blocks has: a few
# held blocks of a large pool would otherwise be invisible.
_MARKS = {3: "h", 2: "c", 1: "f"}


class ServiceStatus:
    """Reads the status for any number of pages."""

    def __init__(self, scheduler: Shards) -> None:
        self._scheduler = scheduler
        self._lock = asyncio.Lock()
        self._status: dict[str, Any] = {}
        self._expires_at = 0.0

    async def get(self) -> dict[str, Any]:
        """RequestError if no scheduler leads."""
        async with self._lock:
            if time.monotonic() >= self._expires_at:
                self._status = to_json(await self._scheduler.status())
                self._expires_at = time.monotonic() + _INTERVAL_S
            return self._status


def to_json(shards: Sequence[ShardStatus | None]) -> dict[str, Any]:
    """Of all shards together; the leader, its epoch and its time are those of the first shard that
    has one. At least one has."""
    led = [shard for shard in shards if shard is not None]
    statuses = [shard.status for shard in led]
    first = led[0]
    return {
        "leader": first.leader,
        "epoch": first.status.epoch,
        "uptime_ms": first.status.uptime_ms,
        "num_accepted": sum(status.num_accepted for status in statuses),
        "num_refused": sum(status.num_refused for status in statuses),
        "queue": {
            "num_requests": sum(status.queue.num_requests for status in statuses),
            "num_tokens": sum(status.queue.num_tokens for status in statuses),
        },
        "workers": [_worker(worker) for status in statuses for worker in status.workers],
        "refused_workers": [
            {"address": one.address, "reason": one.reason}
            for status in statuses
            for one in status.refused_workers
        ],
        # By shard, the address of its leader; null if it has none.
        "shards": [None if shard is None else shard.leader for shard in shards],
    }


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    return {
        # Too large for a number of JavaScript.
        "incarnation": str(worker.incarnation),
        "address": worker.address,
        "draining": worker.draining,
        "num_running": worker.num_running,
        "num_assigned": worker.num_assigned,
        "num_swapped": worker.num_swapped,
        "num_sampled_tokens": worker.num_sampled_tokens,
        "num_blocks": worker.num_blocks,
        "num_free_blocks": worker.num_free_blocks,
        "blocks": _cells(worker.block_map[1:]),
    }


def _cells(blocks: bytes) -> str:
    """A character per cell."""
    per_cell = max(1, -(-len(blocks) // _MAX_CELLS))
    parts = (blocks[at : at + per_cell] for at in range(0, len(blocks), per_cell))
    return "".join(next(_MARKS[kind] for kind in _MARKS if kind in part) for part in parts)
