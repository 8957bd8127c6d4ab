"""A worker of two ranks in a container, which are lost one by one and together."""

import asyncio
from collections.abc import Iterator

import pytest
from compose_project import ComposeProject, Container, docker
from container_streams import PROGRESS_TIMEOUT_S, make_references, streaming, wait_for_progress
from container_waiting import until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

_BRING_UP_S = 180
_EXCHANGES = "exchanges between ranks"


@pytest.fixture
def of_ranks(images: dict[str, str]) -> Iterator[ComposeProject]:
    """A service whose only worker has two ranks."""
    project = ComposeProject("quire-test-ranks", COMPOSE_PROFILES="ranks")
    project.down()
    try:
        project.up("--scale", "worker=0")
        yield project
    finally:
        project.down()


def follower_of(worker: Container, service: ComposeProject) -> int:
    """The process id of rank 1 in the container, by the newest line of its log."""
    lines = [line for line in service.log("worker-ranks") if line["event"] == "rank ready"]
    process: int = lines[-1]["process"]
    return process


async def test_streams_survive_the_loss_of_ranks(of_ranks: ComposeProject) -> None:
    service = of_ranks
    await until(lambda: service.is_ready() and service.has_lanes(1), "the service", _BRING_UP_S)
    references = await asyncio.to_thread(make_references, service.target)
    exchanges = [line for line in service.log("worker-ranks") if line["event"] == _EXCHANGES]
    assert [line["by"] for line in exchanges] == ["shared memory"] * 2
    async with streaming(service.target, references) as streams:
        worker = service.the("worker-ranks")

        kill = f"import os; os.kill({follower_of(worker, service)}, 9)"
        await asyncio.to_thread(docker, "exec", worker.id, "python", "-c", kill)
        # Docker restarts it.
        await until(lambda: service.refreshed(worker).num_restarts == 1, "a restart", 60)
        await until(lambda: service.has_lanes(1), "the restarted worker", _BRING_UP_S)
        await wait_for_progress(streams)

        await asyncio.to_thread(docker, "kill", worker.id)
        await until(lambda: service.has_lanes(0), "the loss of the worker")
        await asyncio.to_thread(docker, "start", worker.id)
        await until(lambda: service.has_lanes(1), "the started worker", _BRING_UP_S)
        await wait_for_progress(streams)
    await until(service.is_idle, "release of all blocks", PROGRESS_TIMEOUT_S)
    assert service.pools().is_conserved
