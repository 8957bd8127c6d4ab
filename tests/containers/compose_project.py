"""A service in containers: the repository's compose file, under a name and a port of its own."""

import json
import os
import shlex
import socket
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import redis
from pool_watch import PoolWatch

from quire.errors import QuireError
from quire.internal.v1.operations_pb2 import GetStatusResponse, WorkerStatus
from quire.operations import Operations
from quire.probe import is_serving

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "ofthetests"
# One of them leads.
SCHEDULERS = ("scheduler", "scheduler-standby")
PORTS = {
    "gateway": 50051,
    "scheduler": 50052,
    "scheduler-standby": 50052,
    "worker": 50053,
}
# Tagged apart from the images that somebody may be using.
IMAGE = "quire-test"
_SETTINGS = {
    "QUIRE_IMAGE": IMAGE,
    "REDIS_PASSWORD": PASSWORD,
    "QUIRE_MODEL_DIR": "./demo/model",
    "QUIRE_MODEL": "/model",
    "QUIRE_MODEL_NAME": "demo",
    # Threads cost more than they bring to a model this small.
    "QUIRE_WORKER_THREADS": "1",
    "QUIRE_WORKER_KV_CACHE_MEMORY": "64MiB",
    "QUIRE_SCHEDULER_CHECK_EVERY_STEP": "true",
    "QUIRE_DRAIN_GRACE_S": "10",
}


def run(*command: str, env: dict[str, str] | None = None, timeout_s: float = 600) -> str:
    """What a command prints; AssertionError with all of it if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def docker(*arguments: str) -> str:
    return run("docker", *arguments).strip()


@dataclass(frozen=True)
class Container:
    """One container as it was when it was looked at."""

    id: str
    service: str
    number: int
    # By the host's count; 0 if it does not run.
    pid: int
    # On each network that it is connected to, by the network's own name.
    addresses: dict[str, str]
    is_running: bool
    exit_code: int
    num_restarts: int
    restart_policy: str
    # Of the last five, those of its start included.
    failing_checks: int
    published: dict[str, Any]

    @classmethod
    def inspected(cls, facts: dict[str, Any]) -> "Container":
        state, settings = facts["State"], facts["NetworkSettings"]
        labels = facts["Config"]["Labels"]
        checks = state.get("Health", {}).get("Log") or ()
        return cls(
            id=facts["Id"],
            service=labels["com.docker.compose.service"],
            number=int(labels["com.docker.compose.container-number"]),
            pid=state["Pid"],
            addresses={name: net["IPAddress"] for name, net in settings["Networks"].items()},
            is_running=state["Running"],
            exit_code=state["ExitCode"],
            num_restarts=facts["RestartCount"],
            restart_policy=facts["HostConfig"]["RestartPolicy"]["Name"],
            failing_checks=sum(check["ExitCode"] != 0 for check in checks),
            published={port: to for port, to in (settings["Ports"] or {}).items() if to},
        )


def _log_of(container: Container) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["docker", "logs", container.id], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


class ComposeProject:
    """Containers, networks and volumes of one name; `down` removes them all."""

    def __init__(self, name: str, **settings: str) -> None:
        self.name = name
        self.target = f"127.0.0.1:{_free_port()}"
        self.env = {
            **os.environ,
            **_SETTINGS,
            **settings,
            "COMPOSE_PROJECT_NAME": name,
            "QUIRE_PORT": self.target,
        }

    def compose(self, *arguments: str, **settings: str) -> str:
        return run(*_compose(), *arguments, env={**self.env, **settings})

    def up(self, *arguments: str, **settings: str) -> None:
        self.compose("up", "--detach", *arguments, **settings)

    def scale(self, num_workers: int) -> None:
        """Adds or removes workers; returns when those removed have drained and stopped."""
        self.up("--no-recreate", "--scale", f"worker={num_workers}")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "1")

    def pause(self, container: Container) -> bool:
        """Whether it has been stopped; on a busy machine that may fail."""
        return (
            subprocess.run(["docker", "pause", container.id], capture_output=True).returncode == 0
        )

    def make(self, target: str) -> str:
        return run("make", target, env=self.env)

    # What is there

    def containers(self, service: str | None = None) -> list[Container]:
        """By number, the stopped ones too."""
        labels = {"project": self.name, "service": service}
        filters = [
            f"--filter=label=com.docker.compose.{label}={value}"
            for label, value in labels.items()
            if value is not None
        ]
        ids = docker("ps", "--all", "--quiet", *filters).split()
        return sorted(_inspected(ids), key=lambda container: container.number)

    def again(self, container: Container) -> Container:
        """The same one as it is now."""
        [now] = _inspected([container.id])
        return now

    def the(self, service: str) -> Container:
        """The one container of a service."""
        [container] = self.containers(service)
        return container

    def leftovers(self) -> list[str]:
        """Ids and names of all that still carries the project's label."""
        mine = f"--filter=label=com.docker.compose.project={self.name}"
        return [
            *docker("ps", "--all", "--quiet", mine).split(),
            *docker("network", "ls", "--quiet", mine).split(),
            *docker("volume", "ls", "--quiet", mine).split(),
        ]

    def log(self, service: str) -> list[dict[str, Any]]:
        """The lines that a service of one container has logged."""
        return _log_of(self.the(service))

    @property
    def network(self) -> str:
        """The one that all are on but Redis."""
        return f"{self.name}_default"

    def address_of(self, container: Container) -> str:
        """Where its service is reached from this machine."""
        return f"{container.addresses[self.network]}:{PORTS[container.service]}"

    # How it is

    def is_ready(self) -> bool:
        return answers(self.target)

    def logged_at(self, container: Container, event: str) -> float:
        """When a container first logged an event, in seconds since 1970."""
        first = next(line for line in _log_of(container) if line["event"] == event)
        return datetime.fromisoformat(first["timestamp"]).timestamp()

    def ready_workers(self) -> list[Container]:
        return [worker for worker in self.containers("worker") if self.answers(worker)]

    def answers(self, container: Container, service: str = "ready") -> bool:
        return container.is_running and answers(self.address_of(container), service)

    def leader(self) -> Container | None:
        """The scheduler that leads; None while none does."""
        for scheduler in map(self.the, SCHEDULERS):
            if self.answers(scheduler, "lead"):
                return scheduler
        return None

    def status(self) -> GetStatusResponse | None:
        """What the leader says; None while nobody leads."""
        leader = self.leader()
        if leader is None:
            return None
        try:
            with Operations(self.address_of(leader)) as operations:
                return operations.status(with_block_maps=False, timeout_s=2.0)
        except QuireError:
            return None

    def lanes(self) -> list[WorkerStatus]:
        """The workers that the leader has; none while nobody leads."""
        status = self.status()
        return list(status.workers) if status else []

    def has_lanes(self, count: int) -> bool:
        return len(self.lanes()) == count

    def is_idle(self) -> bool:
        """There are workers, and all their blocks are free; no request is recorded as live."""
        lanes = self.lanes()
        num_held = sum(lane.num_blocks - lane.num_free_blocks for lane in lanes)
        return bool(lanes) and num_held == 0 and not self.pools().live_requests()

    def redis(self) -> redis.Redis:
        address = self.the("redis").addresses[f"{self.name}_ledger"]
        return redis.Redis(host=address, password=PASSWORD, socket_timeout=5)

    def pools(self) -> PoolWatch:
        return PoolWatch(self.redis())


def crash(container: Container) -> None:
    """Ends its process behind the engine's back, which then does what it does after a crash."""
    code = f"import os; os.kill({container.pid}, 9)"
    host = ("--pid=host", "--user=0", "--entrypoint=python")
    docker("run", "--rm", *host, f"{IMAGE}-gateway:latest", "-c", code)


def _inspected(ids: list[str]) -> list[Container]:
    return list(map(Container.inspected, json.loads(docker("inspect", *ids)) if ids else []))


def answers(target: str, service: str = "ready") -> bool:
    """Whether a server on this machine is serving; a silent one is not."""
    try:
        return is_serving(target, service, timeout_s=2.0)
    except QuireError:
        return False


def _compose() -> list[str]:
    if command := os.environ.get("COMPOSE"):
        return shlex.split(command)
    has_v2 = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return ["docker", "compose"] if has_v2 else ["docker-compose"]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
