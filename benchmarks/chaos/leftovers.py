"""Checks that a run leaves no request, sequence or block behind."""

import asyncio
import time
from collections.abc import Sequence

from benchmarks.chaos.redis_servers import live_records
from benchmarks.chaos.stack import ORPHAN_GRACE_S, ChaosStack
from quire.internal.v1.operations_pb2 import GetStatusResponse

_POLL_S = 0.5
_SPARE_S = 15.0


async def find_leftovers(stack: ChaosStack) -> Sequence[str]:
    """Return what is left after the orphans' grace period; empty if the run was clean."""
    deadline_s = time.monotonic() + ORPHAN_GRACE_S + _SPARE_S
    while left := await asyncio.to_thread(_left, stack):
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_POLL_S)
    return left


def _left(stack: ChaosStack) -> list[str]:
    problem = stack.find_problem()
    if problem is not None:
        return [problem]
    statuses = stack.statuses()
    if len(statuses) < stack.num_shards:
        return ["there is no leader"]
    live = live_records(stack.redis)
    records = [f"{len(live)} records of live requests: {', '.join(live[:3])}"] if live else []
    return [*(left for status in statuses for left in _held(status)), *records]


def _held(status: GetStatusResponse) -> list[str]:
    queued = status.queue.num_requests
    left = [f"{queued} requests are queued"] if queued else []
    for worker in status.workers:
        num_sequences = worker.num_running + worker.num_assigned + worker.num_swapped
        num_held = worker.num_blocks - worker.num_free_blocks
        if num_sequences or num_held:
            left.append(f"{worker.address}: {num_sequences} sequences, {num_held} blocks held")
    return left
