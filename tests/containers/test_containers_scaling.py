"""Workers that join, drain and crash while the service is busy."""

import asyncio

import pytest
from compose_project import ComposeProject, docker
from container_load import Load
from container_waiting import until

from quire.client.async_client import AsyncClient
from quire.client.sampling_params import SamplingParams

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

JOINED_S = 2.0
# A lane's first step may have no rows.
WORKED_STEPS = 3
# Short, so that new requests are placed all the time.
NUM_TOKENS = 16
LONG_PROMPT = "Read the records of a file and return them as a list of tuples. " * 8


def num_working(service: ComposeProject) -> int:
    """Return the number of workers that have run steps."""
    return sum(lane.num_steps >= WORKED_STEPS for lane in service.lanes())


async def num_cached(client: AsyncClient) -> int:
    """Return the cached tokens of the long prompt on its second run. The two runs are consecutive
    because the load evicts blocks within seconds."""
    for _ in range(2):
        output = await client.generate(LONG_PROMPT, SamplingParams(temperature=0, max_tokens=2))
    return output.usage.cached_prompt_tokens


async def test_scaling_under_load_loses_no_request(service: ComposeProject) -> None:
    async with (
        AsyncClient(service.target) as client,
        Load(service.target, max_tokens=NUM_TOKENS) as load,
    ):
        assert await num_cached(client) > 0
        await until(lambda: num_working(service) == 1, "the first worker's steps")

        known = {worker.id for worker in service.containers("worker")}
        scaling = asyncio.create_task(asyncio.to_thread(service.scale, 3))
        for count in (2, 3):
            await until(lambda n=count: len(service.ready_workers()) >= n, f"{count} workers", 120)
            await until(lambda n=count: num_working(service) >= n, f"work for {count} workers")
        await scaling
        # By the workers' own logs: polling is slow while three workers load and run a model.
        for worker in service.containers("worker"):
            if worker.id not in known:
                ready_s = service.logged_at(worker, "ready")
                assert service.logged_at(worker, "first work") - ready_s <= JOINED_S
        assert await num_cached(client) > 0

        await asyncio.to_thread(service.scale, 1)
        await until(lambda: service.has_lanes(1), "removal of the other workers")
        done = load.num_done
        await until(lambda: load.num_done > done + 16, "work on the remaining worker", 60)
        assert await num_cached(client) > 0

    assert load.failures == []
    assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in load.outputs)


async def test_a_killed_worker_fails_no_request_and_rejoins(service: ComposeProject) -> None:
    service.scale(2)
    await until(lambda: len(service.ready_workers()) == 2, "two workers", 120)
    async with Load(service.target, num_clients=8) as load:
        await until(lambda: num_working(service) == 2, "work on both", 60)

        victim = service.containers("worker")[1]
        await asyncio.to_thread(docker, "kill", victim.id)
        await until(lambda: service.has_lanes(1), "the loss of the worker")
        done = load.num_done
        await until(lambda: load.num_done > done + 16, "progress of the others", 60)

        await asyncio.to_thread(docker, "start", victim.id)
        await until(lambda: num_working(service) == 2, "work on both again", 120)

    assert load.failures == []
