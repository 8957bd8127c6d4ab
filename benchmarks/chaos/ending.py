"""What has to hold when all is over: nothing is left behind."""

import asyncio
import time
from collections.abc import Sequence

import redis

from benchmarks.chaos.stack import ORPHAN_GRACE_S, ChaosStack
from quire.internal.v1.operations_pb2 import GetStatusResponse

_POLL_S = 0.5
_SPARE_S = 15.0
_FOR_EVER = -1


async def left_behind(stack: ChaosStack) -> Sequence[str]:
    """What is still there when orphans have had their time; empty as it should be."""
    deadline_s = time.monotonic() + ORPHAN_GRACE_S + _SPARE_S
    while left := await asyncio.to_thread(_left, stack):
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_POLL_S)
    return left


def _left(stack: ChaosStack) -> list[str]:
    missing = stack.unsettled()
    if missing is not None:
        return [missing]
    status = stack.status()
    return [
        *(["nobody leads"] if status is None else _held(status)),
        *_live_records(stack.local.redis.url),
    ]


def _held(status: GetStatusResponse) -> list[str]:
    queued = status.queue.num_requests
    left = [f"{queued} requests are queued"] if queued else []
    for worker in status.workers:
        num_sequences = worker.num_running + worker.num_assigned + worker.num_swapped
        num_held = worker.num_blocks - worker.num_free_blocks
        if num_sequences or num_held:
            left.append(f"{worker.address}: {num_sequences} sequences, {num_held} blocks held")
    return left


def _live_records(url: str) -> list[str]:
    """Records of requests live without a time to live."""
    with redis.Redis.from_url(url) as client:
        keys = list(client.scan_iter("quire:{request:*", count=1000))
        live = [key.decode() for key in keys if client.ttl(key) == _FOR_EVER]
    return [f"{len(live)} records of live requests: {', '.join(live[:3])}"] if live else []
