"""What is done to the parts of a busy service, none of which its streams notice."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime

import pytest
from compose_project import SCHEDULERS, ComposeProject, Container, crash, docker
from container_streams import GOES_ON_S, go_on, streaming, told, undisturbed
from container_waiting import until

from benchmarks.chaos.streams import Reference, Streams

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]

NUM_WORKERS = 3
# Within which a worker that says nothing is given up.
NOTICED_S = 3.5
SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    # Slow, so that the clients have time to read.
    "QUIRE_WORKER_SIM_STEP_MS": "50",
    "QUIRE_WORKER_MAX_MODEL_LEN": "1024",
    "QUIRE_WORKER_NUM_BLOCKS": "1025",
}


@pytest.fixture(scope="module")
def simulated(images: dict[str, str]) -> Iterator[ComposeProject]:
    """Three simulated workers, two schedulers, a gateway and Redis."""
    project = ComposeProject("quire-test-sim", **SETTINGS)
    project.down()
    try:
        project.scale(NUM_WORKERS)
        yield project
    finally:
        project.down()


@pytest.fixture(scope="module")
def references(simulated: ComposeProject) -> list[Reference]:
    asyncio.run(until(lambda: is_whole(simulated), "the service", 120))
    return undisturbed(simulated.target)


@pytest.fixture
async def service(
    simulated: ComposeProject, references: list[Reference]
) -> AsyncIterator[ComposeProject]:
    """All of it is there, before and afterwards; in the end all blocks are free."""
    await until(lambda: is_whole(simulated), "the service", 120)
    yield simulated
    await until(lambda: is_whole(simulated), "the service", 120)
    await until(simulated.is_idle, "the blocks' return", 60)
    assert simulated.pools().is_conserved


def is_whole(service: ComposeProject) -> bool:
    return (
        service.is_ready()
        and all(service.answers(service.the(name), "") for name in SCHEDULERS)
        and service.has_lanes(NUM_WORKERS)
    )


async def whole_again(service: ComposeProject, streams: Streams) -> None:
    await until(lambda: is_whole(service), "the whole service", GOES_ON_S)
    await go_on(streams)


async def do(*arguments: str) -> None:
    """The clients read on meanwhile."""
    await asyncio.to_thread(docker, *arguments)


def busiest_worker(service: ComposeProject) -> Container:
    address = max(service.lanes(), key=lambda lane: lane.num_running).address
    [container] = [c for c in service.containers("worker") if service.address_of(c) == address]
    return container


def the_leader(service: ComposeProject) -> Container:
    leader = service.leader()
    assert leader is not None
    return leader


async def test_a_worker_that_is_killed_is_not_missed(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        worker = busiest_worker(service)
        with told("worker killed", streams):
            await do("kill", worker.id)
            await until(lambda: service.has_lanes(NUM_WORKERS - 1), "the loss of the worker")
            await go_on(streams)
        await do("start", worker.id)
        await whole_again(service, streams)


async def test_the_standby_takes_over_when_the_leader_is_killed(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        leader = the_leader(service)
        with told("leader killed", streams):
            await do("kill", leader.id)
            await until(lambda: service.has_lanes(NUM_WORKERS), "the other one's leading")
            await go_on(streams)
        assert the_leader(service).service != leader.service
        await do("start", leader.id)
        await whole_again(service, streams)
        assert the_leader(service).service != leader.service


@pytest.mark.parametrize("name", ["gateway", "redis"])
async def test_streams_wait_for_what_there_is_one_of(
    service: ComposeProject, references: Sequence[Reference], name: str
) -> None:
    async with streaming(service.target, references) as streams:
        with told(f"{name} killed and started", streams):
            await do("kill", service.the(name).id)
            await do("start", service.the(name).id)
            await whole_again(service, streams)


async def test_what_dies_by_itself_is_started_again(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    assert {container.restart_policy for container in service.containers()} == {"unless-stopped"}
    async with streaming(service.target, references) as streams:
        for victim in (busiest_worker(service), service.the("gateway")):
            with told(f"{victim.service} crashed", streams):
                await asyncio.to_thread(crash, victim)
                await until(
                    lambda victim=victim: is_started_again(service, victim),
                    "the engine's start of it",
                )
                await whole_again(service, streams)


def is_started_again(service: ComposeProject, former: Container) -> bool:
    now = service.again(former)
    return now.num_restarts > former.num_restarts and now.is_running


async def test_a_paused_worker_is_given_up_and_comes_back(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        worker = busiest_worker(service)
        with told("worker paused", streams):
            await until(lambda: service.pause(worker), "the pause")
            paused_at = datetime.now(UTC)
            await until(lambda: service.has_lanes(NUM_WORKERS - 1), "the loss of the worker")
            await go_on(streams)
        # What it was doing comes now, late.
        await do("unpause", worker.id)
        await whole_again(service, streams)
    noticed_s = (left_at(service, worker) - paused_at).total_seconds()
    print(f"noticed after {noticed_s:.1f} s")
    assert noticed_s < NOTICED_S


def left_at(service: ComposeProject, worker: Container) -> datetime:
    """When the leader last gave a worker up, by its log."""
    times = [
        line["timestamp"]
        for line in service.log(the_leader(service).service)
        if line["event"] == "worker left" and line["address"] == service.address_of(worker)
    ]
    return datetime.fromisoformat(times[-1])


async def test_a_worker_that_was_cut_off_comes_back(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        worker = busiest_worker(service)
        with told("worker cut off", streams):
            await do("network", "disconnect", service.network, worker.id)
            await until(lambda: service.has_lanes(NUM_WORKERS - 1), "the loss of the worker")
            await go_on(streams)
        await do("network", "connect", "--alias", "worker", service.network, worker.id)
        await whole_again(service, streams)


async def test_scaling_down_to_one(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        with told("two of three workers removed", streams):
            await asyncio.to_thread(service.scale, 1)
            await go_on(streams)
        assert service.has_lanes(1)
        await asyncio.to_thread(service.scale, NUM_WORKERS)
        await whole_again(service, streams)


async def test_every_container_is_replaced_one_service_after_the_other(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    before = service.containers()
    async with streaming(service.target, references) as streams:
        for name in ("redis", *reversed(SCHEDULERS), "gateway"):
            with told(f"{name} replaced", streams):
                await asyncio.to_thread(service.up, "--no-deps", "--force-recreate", name)
                await whole_again(service, streams)
        with told("workers replaced", streams):
            await replace_workers(service)
            await whole_again(service, streams)
    assert not {c.id for c in before} & {c.id for c in service.containers()}


async def replace_workers(service: ComposeProject) -> None:
    former = [worker.id for worker in service.containers("worker")]
    await asyncio.to_thread(service.scale, 2 * NUM_WORKERS)
    await until(lambda: service.has_lanes(2 * NUM_WORKERS), "the new workers", GOES_ON_S)
    await do("stop", "--time", "40", *former)
    await do("rm", *former)
