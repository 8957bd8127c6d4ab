"""Requests that run while the primary of several Redis servers dies."""

from pathlib import Path

import pytest
from checking_worker import CheckingWorker
from redis_groups import Cluster, Sentinels, Server, running
from scheduler_load import Load, worker_name
from scheduler_stack import running_stack
from waiting import until

from scheduler_svc.store.keys import ShardKeys

KEYS = ShardKeys(0)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["cluster", "sentinels"])
async def test_no_request_is_lost_when_a_replica_is_promoted(tmp_path, sockets, kind: str) -> None:
    group, primary = _started(kind, tmp_path)
    worker = CheckingWorker(1, num_blocks=256)
    workers = {worker_name(0): worker}
    with running(group):
        async with running_stack(group.url, sockets, workers, lease_s=0.6) as stack:
            load = Load(stack, [worker], max_model_len=64)
            await load.start()
            for number in range(8):
                await load.submit(
                    gateway=number % 2,
                    length=9,
                    tag=number,
                    max_tokens=40,
                    seed=number + 1,
                    stop_at=None,
                    n=1 + number % 2,
                    priority=0,
                    num_logprobs=number % 3,
                )
            await until(
                lambda: all(len(one.received.token_ids) > 3 for one in load.requests), "tokens"
            )
            for request in load.open:
                # The replica may lack the last writes.
                request.received.is_redelivered = True
            primary.kill()
            await load.finish()
            assert all(request.received.failure is None for request in load.requests)
            await load.check()


def _started(kind: str, directory: Path) -> tuple[Cluster | Sentinels, Server]:
    if kind == "cluster":
        cluster = Cluster(directory, KEYS.leadership)
        return cluster, cluster.owner
    sentinels = Sentinels(directory)
    return sentinels, sentinels.primary
