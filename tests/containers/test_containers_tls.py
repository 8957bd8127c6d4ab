"""TLS between all containers."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import make_certificates
from compose_project import ComposeProject, serves
from container_waiting import until

from quire.client.client import Client
from quire.client.errors import QuireError
from quire.client.health_probe import is_serving
from quire.client.sampling_params import SamplingParams
from quire.service.tls import TLS

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

BRING_UP_S = 120


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "certificates")


@pytest.fixture
def encrypted(images: dict[str, str], certificates: Path) -> Iterator[ComposeProject]:
    """A project with mutual TLS everywhere, not started."""
    project = ComposeProject(
        "quire-test-tls",
        COMPOSE_FILE="docker-compose.yml:docker-compose.tls.yml",
        QUIRE_CERTIFICATES=str(certificates),
        QUIRE_GATEWAY_TLS_CLIENT_CA="/run/secrets/ca.pem",
    )
    project.down()
    try:
        yield project
    finally:
        project.down()


async def test_all_connections_have_tls(encrypted: ComposeProject, certificates: Path) -> None:
    project, ca = encrypted, certificates / "ca.pem"
    tls = TLS(ca, certificates / "client.pem", certificates / "client-key.pem")

    def is_ready() -> bool:
        try:
            return all(is_serving(x, tls=tls) for x in (project.target, project.second_target))
        except QuireError:
            return False

    project.make("up", f"UP_TIMEOUT_S={BRING_UP_S}")
    assert is_ready()
    for target in (project.target, project.second_target):
        with Client(target, tls=tls) as client:
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            output = client.generate("Return the number of", params)
        assert output.usage.completion_tokens == 4
        assert not serves(target)
    for name in ("scheduler", "scheduler-2", "worker"):
        # The first checks may come before the worker has loaded its model.
        await until(lambda name=name: project.the(name).is_healthy, f"{name}'s health", BRING_UP_S)
        container = project.the(name)
        assert not project.serves(container, "")
        assert is_serving(project.address_of(container), "", tls=TLS(ca, tls.cert, tls.key, name))
    host, port = project.target.split(":")
    before = ssl.get_server_certificate((host, int(port)))
    make_certificates(certificates)
    assert ssl.get_server_certificate((host, int(port))) != before
    assert is_ready()
