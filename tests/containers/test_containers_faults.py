"""Start order, wrong settings, and stops of services that others depend on."""

import asyncio
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compose_project import SCHEDULERS, ComposeProject, docker
from container_waiting import until

from quire.client.async_client import AsyncClient
from quire.client.client import Client
from quire.client.errors import QuireError
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

BRING_UP_S = 120
SERVICES = ("redis", "scheduler", "scheduler-2", "worker", "gateway", "gateway-2")
SHORT = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0.8, max_tokens=900, ignore_eos=True)


def generate(target: str, **options: Any) -> RequestOutput:
    with Client(target, resume_timeout_s=0) as client:
        return client.generate("Return the number of", SHORT, timeout_s=60, **options)


def errors(service: ComposeProject, name: str) -> list[dict[str, Any]]:
    return [line for line in service.log(name) if line["level"] == "error"]


async def test_the_service_becomes_ready_in_any_order_of_start(project: ComposeProject) -> None:
    orders = list(itertools.permutations(SERVICES))
    for order in [SERVICES[::-1], random.choice(orders)]:
        print("order", order)
        for name in order:
            project.up("--no-deps", name)
            # Each is alive before the next is started, although it waits for others.
            await until(lambda name=name: is_alive(project, name), f"{name}, alive", BRING_UP_S)
        await until(project.is_ready, "readiness", BRING_UP_S)
        assert len(generate(project.target).outputs[0].token_ids) > 0
        assert [container.num_restarts for container in project.containers()] == [0] * len(SERVICES)
        docker("kill", *(container.id for container in project.containers()))


def is_alive(project: ComposeProject, name: str) -> bool:
    container = project.the(name)
    if name == "redis":
        return container.is_running
    return project.serves(container, service="")


async def test_redis_keeps_its_data_over_a_restart(service: ComposeProject) -> None:
    generate(service.target, request_id="before")
    await until(service.is_idle, "release of all blocks")
    service.compose("restart", "redis")
    await until(lambda: service.redis().ping(), "Redis")
    assert service.redis().keys("quire:{shard:0}:request:*before*")
    await until(service.is_ready, "readiness", BRING_UP_S)
    output = generate(service.target, request_id="after")
    assert len(output.outputs[0].token_ids) > 0
    assert service.redis().keys("quire:{shard:0}:request:*after*")


async def test_a_wrong_password_is_logged_once_and_prevents_readiness(
    project: ComposeProject,
) -> None:
    project.up("--no-deps", "redis")
    wrong = project.password_file("wrong-password", "wrong")
    project.up("--no-deps", "scheduler", REDIS_PASSWORD_FILE=wrong)
    await stays_up_unhealthy(project, "scheduler")
    [error] = errors(project, "scheduler")
    assert "password" in error["reason"]
    assert "wrong" not in error["reason"].split()


async def test_a_missing_model_is_logged_once_and_prevents_readiness(
    project: ComposeProject, tmp_path: Path
) -> None:
    project.up(QUIRE_MODEL_DIR=str(tmp_path))
    for name in ("worker", "gateway"):
        await stays_up_unhealthy(project, name)
        [error] = errors(project, name)
        assert "/model" in error["reason"]
    # The schedulers' container checks pass without a worker, their readiness does not.
    for name in SCHEDULERS:
        await until(lambda name=name: project.the(name).is_healthy, f"{name}'s health", 60)
        assert not project.serves(project.the(name))
    with pytest.raises(QuireError) as caught:
        generate(project.target)
    assert caught.value.code.name == "UNAVAILABLE"


async def stays_up_unhealthy(project: ComposeProject, name: str) -> None:
    """Check that the process is alive, its container's checks fail, and it is not restarted."""
    await until(lambda: is_alive(project, name), f"{name}, alive", BRING_UP_S)
    await until(lambda: project.the(name).failing_checks > 2, f"{name}'s checks", BRING_UP_S)
    await until(lambda: is_alive(project, name), f"{name}, alive")
    # On a slow machine a worker imports its packages for longer than that.
    await until(lambda: bool(errors(project, name)), f"{name}'s error", BRING_UP_S)
    assert not project.serves(project.the(name))
    assert project.the(name).num_restarts == 0


async def test_a_stop_under_load_ends_every_stream_with_a_status(service: ComposeProject) -> None:
    async with AsyncClient(service.target, resume_timeout_s=0) as client:
        streams = [asyncio.create_task(follow(client, seed)) for seed in range(24)]
        await until(lambda: num_running(service) == 24, "running streams", 60)
        stopping = asyncio.create_task(asyncio.to_thread(service.compose, "stop"))
        ends = await asyncio.gather(*streams)
        await stopping
    assert set(ends) <= {"length", "UNAVAILABLE"}
    # A container that had to be killed has 137.
    assert [container.exit_code for container in service.containers()] == [0] * len(SERVICES)


def num_running(service: ComposeProject) -> int:
    return sum(lane.num_running for lane in service.lanes())


async def follow(client: AsyncClient, seed: int) -> str:
    """Read a stream; return its finish reason or its status."""
    try:
        reason = "without an end"
        params = replace(LONG, seed=seed)
        async for delta in client.stream_generate(f"Return {seed}", params):
            for output in delta.outputs:
                reason = output.finish_reason or reason
        return reason
    except QuireError as error:
        return error.code.name
