"""Fixtures: images built once, and a compose project that most tests share."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
from compose_project import IMAGE, ComposeProject
from container_waiting import until

BRING_UP_S = 120


@pytest.fixture(scope="session")
def images() -> dict[str, str]:
    """Images of gateway, scheduler and worker, built from the present tree, by target."""
    ComposeProject("quire-test-build").compose("build")
    return {name: f"{IMAGE}-{name}:latest" for name in ("gateway", "scheduler", "worker")}


@pytest.fixture(scope="session")
def shared_project(images: dict[str, str]) -> Iterator[ComposeProject]:
    project = ComposeProject("quire-test")
    project.down()
    try:
        yield project
    finally:
        project.down()


@pytest.fixture
async def service(shared_project: ComposeProject) -> AsyncIterator[ComposeProject]:
    """A ready service with one worker, which the test may change at will. Afterwards all blocks of
    all pools are free, if Redis runs."""
    project = shared_project
    project.up("--scale", "worker=1")
    await until(project.is_ready, "readiness", BRING_UP_S)
    yield project
    if project.the("redis").is_running:
        await until(project.is_idle, "release of all blocks", BRING_UP_S)
        assert project.pools().is_conserved


@pytest.fixture
def project(images: dict[str, str]) -> Iterator[ComposeProject]:
    """A project for one test, not started."""
    project = ComposeProject("quire-test-own")
    project.down()
    try:
        yield project
    finally:
        project.down()


@pytest.fixture(scope="session")
def base_image() -> str:
    return os.environ.get("BASE_IMAGE", "python:3.11-slim")


@pytest.fixture(scope="session")
def build_image() -> str:
    return os.environ.get("BUILD_IMAGE", "python:3.11-slim")
