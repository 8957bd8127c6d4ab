"""What containers may do, and what they may use."""

import json
from pathlib import Path
from typing import Any

import pytest
from compose_project import PASSWORD, ComposeProject, docker

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

LIMITS = {"REDIS_MEMORY": "256m", "REDIS_MAXMEMORY": "64mb", "GATEWAY_CPUS": "0.5"}


def hosts(service: ComposeProject) -> dict[str, dict[str, Any]]:
    """Return the settings of each container towards the host, by service."""
    return {
        facts["Config"]["Labels"]["com.docker.compose.service"]: facts["HostConfig"]
        for facts in json.loads(docker("inspect", *(c.id for c in service.containers())))
    }


def test_containers_have_no_privileges_and_can_write_to_volumes_alone(
    service: ComposeProject,
) -> None:
    for host in hosts(service).values():
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "5"}
    for container in service.containers():
        status = Path(f"/proc/{container.pid}/status").read_text()
        facts = dict(line.split(":\t", 1) for line in status.splitlines())
        assert "0" not in facts["Uid"].split()
        assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
        assert facts["NoNewPrivs"] == "1"


def test_every_container_has_limits(service: ComposeProject) -> None:
    found = {
        name: (host["Memory"] >> 30, host["NanoCpus"], host["PidsLimit"])
        for name, host in hosts(service).items()
    }
    assert found == {
        "redis": (2, 0, 128),
        "scheduler": (2, 0, 512),
        "scheduler-2": (2, 0, 512),
        "worker": (16, 0, 4096),
        "gateway": (2, 0, 512),
        "gateway-2": (2, 0, 512),
    }


def test_limits_are_variables(project: ComposeProject) -> None:
    project.up("--no-deps", "redis", "gateway", **LIMITS)
    assert hosts(project)["redis"]["Memory"] == 256 << 20
    assert hosts(project)["gateway"]["NanoCpus"] == 500_000_000
    with project.redis() as client:
        assert client.config_get("maxmemory*")["maxmemory"] == str(64 << 20)


def test_redis_evicts_nothing_and_does_not_expose_its_password(
    service: ComposeProject,
) -> None:
    redis = service.the("redis")
    with service.redis() as client:
        assert client.config_get("maxmemory*")["maxmemory-policy"] == "noeviction"
        assert client.config_get("save") == {"save": ""}
    assert PASSWORD not in docker("inspect", *(c.id for c in service.containers()))
    assert PASSWORD not in Path(f"/proc/{redis.pid}/cmdline").read_text()
    assert PASSWORD not in Path(f"/proc/{redis.pid}/environ").read_text()
