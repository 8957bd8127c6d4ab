"""Faults in a busy service, none of which affects the output of its streams."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime

import pytest
from compose_project import GATEWAYS, SCHEDULERS, ComposeProject, Container, crash, docker
from container_streams import (
    PROGRESS_TIMEOUT_S,
    make_references,
    reported_pauses,
    streaming,
    wait_for_progress,
)
from container_waiting import until

from benchmarks.chaos.streams import Reference, Streams
from quire.internal.v1.operations_pb2 import WorkerStatus

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]

NUM_WORKERS = 3
# Limit for the detection of a silent worker.
DETECTED_S = 3.5
SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    # Slow enough for the clients to read.
    "QUIRE_WORKER_SIM_STEP_MS": "50",
    "QUIRE_WORKER_MAX_MODEL_LEN": "1024",
    "QUIRE_WORKER_NUM_BLOCKS": "1025",
}


@pytest.fixture(scope="module")
def simulated(images: dict[str, str]) -> Iterator[ComposeProject]:
    """Three simulated workers, two schedulers, two gateways and Redis."""
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
    return make_references(simulated.target)


@pytest.fixture
async def service(
    simulated: ComposeProject, references: list[Reference]
) -> AsyncIterator[ComposeProject]:
    """The service, complete before and after the test; afterwards all blocks are free."""
    await until(lambda: is_whole(simulated), "the service", 120)
    yield simulated
    await until(lambda: is_whole(simulated), "the service", 120)
    await until(simulated.is_idle, "release of all blocks", 60)
    assert simulated.pools().is_conserved


def is_whole(service: ComposeProject) -> bool:
    return (
        service.is_ready()
        and all(service.serves(service.the(name), "") for name in SCHEDULERS)
        and service.has_lanes(NUM_WORKERS)
    )


async def wait_for_recovery(service: ComposeProject, streams: Streams) -> None:
    await until(lambda: is_whole(service), "the whole service", PROGRESS_TIMEOUT_S)
    await wait_for_progress(streams)


async def run_docker(*arguments: str) -> None:
    """Run docker in a thread, so that the clients continue to read."""
    await asyncio.to_thread(docker, *arguments)


async def busiest_worker(service: ComposeProject) -> Container:
    lanes: list[WorkerStatus] = []

    def find_lanes() -> bool:
        lanes[:] = service.lanes()
        return bool(lanes)

    await until(find_lanes, "the workers")
    address = max(lanes, key=lambda lane: lane.num_running).address
    [container] = [c for c in service.containers("worker") if service.address_of(c) == address]
    return container


async def the_leader(service: ComposeProject) -> Container:
    found: list[Container | None] = []

    def find_leader() -> bool:
        found[:] = [service.leader()]
        return found[0] is not None

    await until(find_leader, "the leader")
    [leader] = found
    assert leader is not None
    return leader


async def test_streams_survive_a_killed_worker(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        worker = await busiest_worker(service)
        with reported_pauses("worker killed", streams):
            await run_docker("kill", worker.id)
            await until(lambda: service.has_lanes(NUM_WORKERS - 1), "the loss of the worker")
            await wait_for_progress(streams)
        await run_docker("start", worker.id)
        await wait_for_recovery(service, streams)


async def test_the_standby_takes_over_when_the_leader_is_killed(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        leader = await the_leader(service)
        with reported_pauses("leader killed", streams):
            await run_docker("kill", leader.id)
            await until(lambda: service.has_lanes(NUM_WORKERS), "the standby's takeover")
            await wait_for_progress(streams)
        assert (await the_leader(service)).service != leader.service
        await run_docker("start", leader.id)
        await wait_for_recovery(service, streams)
        assert (await the_leader(service)).service != leader.service


@pytest.mark.parametrize("name", ["gateway", "redis"])
async def test_streams_survive_a_restart_of_a_single_service(
    service: ComposeProject, references: Sequence[Reference], name: str
) -> None:
    async with streaming(service.target, references) as streams:
        with reported_pauses(f"{name} killed and started", streams):
            await run_docker("kill", service.the(name).id)
            await run_docker("start", service.the(name).id)
            await wait_for_recovery(service, streams)


async def test_streams_continue_on_the_second_gateway_while_the_first_is_gone(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(f"{service.target},{service.second_target}", references) as streams:
        with reported_pauses("gateway killed", streams):
            await run_docker("kill", service.the("gateway").id)
            await wait_for_progress(streams)
        assert not service.the("gateway").is_running
        await run_docker("start", service.the("gateway").id)
        await wait_for_recovery(service, streams)


async def test_crashed_containers_are_restarted(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    assert {container.restart_policy for container in service.containers()} == {"unless-stopped"}
    async with streaming(service.target, references) as streams:
        for victim in (await busiest_worker(service), service.the("gateway")):
            with reported_pauses(f"{victim.service} crashed", streams):
                await asyncio.to_thread(crash, victim)
                await until(
                    lambda victim=victim: is_started_again(service, victim),
                    "a restart by Docker",
                )
                await wait_for_recovery(service, streams)


def is_started_again(service: ComposeProject, before: Container) -> bool:
    now = service.refreshed(before)
    return now.num_restarts > before.num_restarts and now.is_running


async def test_a_paused_worker_is_dropped_and_rejoins(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        worker = await busiest_worker(service)
        with reported_pauses("worker paused", streams):
            await until(lambda: service.pause(worker), "the pause")
            paused_at = datetime.now(UTC)
            await until(lambda: service.has_lanes(NUM_WORKERS - 1), "the loss of the worker")
            await wait_for_progress(streams)
        # The result of its step arrives late.
        await run_docker("unpause", worker.id)
        await wait_for_recovery(service, streams)
    detected_s = (await dropped_at(service, worker) - paused_at).total_seconds()
    print(f"detected after {detected_s:.1f} s")
    assert detected_s < DETECTED_S


async def dropped_at(service: ComposeProject, worker: Container) -> datetime:
    """Return when the leader last dropped a worker, by its log."""
    leader = await the_leader(service)
    times = [
        line["timestamp"]
        for line in service.log(leader.service)
        if line["event"] == "worker left" and line["address"] == service.address_of(worker)
    ]
    return datetime.fromisoformat(times[-1])


async def test_a_disconnected_worker_rejoins(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        worker = await busiest_worker(service)
        with reported_pauses("worker disconnected", streams):
            await run_docker("network", "disconnect", service.network, worker.id)
            await until(lambda: service.has_lanes(NUM_WORKERS - 1), "the loss of the worker")
            await wait_for_progress(streams)
        await run_docker("network", "connect", "--alias", "worker", service.network, worker.id)
        await wait_for_recovery(service, streams)


async def test_streams_survive_scaling_down_to_one_worker(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    async with streaming(service.target, references) as streams:
        with reported_pauses("two of three workers removed", streams):
            await asyncio.to_thread(service.scale, 1)
            await wait_for_progress(streams)
        assert service.has_lanes(1)
        await asyncio.to_thread(service.scale, NUM_WORKERS)
        await wait_for_recovery(service, streams)


async def test_streams_survive_a_rolling_replacement_of_all_containers(
    service: ComposeProject, references: Sequence[Reference]
) -> None:
    before = service.containers()
    async with streaming(service.target, references) as streams:
        for name in ("redis", *reversed(SCHEDULERS), *GATEWAYS):
            with reported_pauses(f"{name} replaced", streams):
                await asyncio.to_thread(service.up, "--no-deps", "--force-recreate", name)
                await wait_for_recovery(service, streams)
        with reported_pauses("workers replaced", streams):
            await replace_workers(service)
            await wait_for_recovery(service, streams)
    assert not {c.id for c in before} & {c.id for c in service.containers()}


async def replace_workers(service: ComposeProject) -> None:
    old = [worker.id for worker in service.containers("worker")]
    await asyncio.to_thread(service.scale, 2 * NUM_WORKERS)
    await until(lambda: service.has_lanes(2 * NUM_WORKERS), "the new workers", PROGRESS_TIMEOUT_S)
    await run_docker("stop", "--time", "40", *old)
    await run_docker("rm", *old)
