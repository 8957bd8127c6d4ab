"""The repository's compose file as a project with its own name and port."""

import json
import os
import shlex
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import redis
from pool_watch import PoolWatch

from quire.client.errors import QuireError
from quire.client.health_probe import is_serving
from quire.client.operations import Operations
from quire.internal.v1.operations_pb2 import GetStatusResponse, WorkerStatus

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "ofthetests"
# One of them is the leader.
SCHEDULERS = ("scheduler", "scheduler-2")
GATEWAYS = ("gateway", "gateway-2")
PORTS = {
    "gateway": 50051,
    "gateway-2": 50051,
    "scheduler": 50052,
    "scheduler-2": 50052,
    "worker": 50053,
    "worker-ranks": 50053,
}
# Separate tags: images of the user are not overwritten.
IMAGE = "quire-test"
_SETTINGS = {
    "QUIRE_IMAGE": IMAGE,
    "QUIRE_MODEL_DIR": "./demo/model",
    "QUIRE_MODEL": "/model",
    "QUIRE_MODEL_NAME": "demo",
    # The model is too small to gain from threads.
    "QUIRE_WORKER_THREADS": "1",
    "QUIRE_WORKER_KV_CACHE_MEMORY": "64MiB",
    "QUIRE_SCHEDULER_CHECK_EVERY_STEP": "true",
    "QUIRE_DRAIN_GRACE_S": "10",
}


def run(*command: str, env: dict[str, str] | None = None, timeout_s: float = 1200) -> str:
    """Return the output of a command; AssertionError with all output if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def docker(*arguments: str) -> str:
    return run("docker", *arguments).strip()


@dataclass(frozen=True)
class Container:
    """A snapshot of one container."""

    id: str
    service: str
    number: int
    # On the host; 0 if it does not run.
    pid: int
    # By the name of the network.
    addresses: dict[str, str]
    is_running: bool
    exit_code: int
    num_restarts: int
    restart_policy: str
    # Of the last five checks, including those in the start period.
    failing_checks: int
    # By the last checks; one may fail on a busy machine.
    is_healthy: bool
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
            is_healthy=state.get("Health", {}).get("Status") == "healthy",
            published={port: to for port, to in (settings["Ports"] or {}).items() if to},
        )


def _log_of(container: Container) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["docker", "logs", container.id], capture_output=True, text=True, check=True
    )
    # gRPC's core writes lines of its own, such as those of a ping that timed out.
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]


class ComposeProject:
    """Containers, networks and volumes of one name; `down` removes them all."""

    def __init__(self, name: str, **settings: str) -> None:
        self.name = name
        self.target, self.http, self.second_target, second_http = (
            f"127.0.0.1:{port}" for port in _free_ports(4)
        )
        self._secrets = tempfile.TemporaryDirectory(prefix="quire-")
        self.env = {
            **os.environ,
            **_SETTINGS,
            **settings,
            "COMPOSE_PROJECT_NAME": name,
            "QUIRE_PORT": self.target,
            "QUIRE_HTTP_PORT": self.http,
            "QUIRE_PORT_2": self.second_target,
            "QUIRE_HTTP_PORT_2": second_http,
            "REDIS_PASSWORD_FILE": self.password_file("redis-password", PASSWORD),
        }

    def password_file(self, name: str, password: str) -> str:
        """Write a file that only this user and the containers can reach; return its path."""
        file = Path(self._secrets.name) / name
        file.write_text(password + "\n")
        file.chmod(0o444)
        return str(file)

    def compose(self, *arguments: str, **settings: str) -> str:
        return run(*_compose(), *arguments, env={**self.env, **settings})

    def up(self, *arguments: str, **settings: str) -> None:
        self.compose("up", "--detach", *arguments, **settings)

    def scale(self, num_workers: int) -> None:
        """Add or remove workers; return when removed workers have drained and stopped."""
        self.make("scale", f"WORKERS={num_workers}")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "1")

    def pause(self, container: Container) -> bool:
        """Pause a container and return whether that succeeded; it may fail on a busy machine."""
        return (
            subprocess.run(["docker", "pause", container.id], capture_output=True).returncode == 0
        )

    def make(self, target: str, *variables: str) -> str:
        return run("make", target, *variables, env=self.env)

    def containers(self, service: str | None = None) -> list[Container]:
        """Return the containers by number, including stopped ones."""
        labels = {"project": self.name, "service": service}
        filters = [
            f"--filter=label=com.docker.compose.{label}={value}"
            for label, value in labels.items()
            if value is not None
        ]
        ids = docker("ps", "--all", "--quiet", *filters).split()
        return sorted(_inspected(ids), key=lambda container: container.number)

    def refreshed(self, container: Container) -> Container:
        """Return the present state of a container."""
        [now] = _inspected([container.id])
        return now

    def the(self, service: str) -> Container:
        """Return the only container of a service."""
        [container] = self.containers(service)
        return container

    def leftovers(self) -> list[str]:
        """Return ids and names of everything that has the project's label."""
        mine = f"--filter=label=com.docker.compose.project={self.name}"
        return [
            *docker("ps", "--all", "--quiet", mine).split(),
            *docker("network", "ls", "--quiet", mine).split(),
            *docker("volume", "ls", "--quiet", mine).split(),
        ]

    def log(self, service: str) -> list[dict[str, Any]]:
        """Return the log records of a service with one container."""
        return _log_of(self.the(service))

    @property
    def network(self) -> str:
        """The network of all services except Redis."""
        return f"{self.name}_default"

    def address_of(self, container: Container) -> str:
        """Return the address of its service as seen from this machine."""
        return f"{container.addresses[self.network]}:{PORTS[container.service]}"

    def is_ready(self) -> bool:
        return serves(self.target) and serves(self.second_target)

    def logged_at(self, container: Container, event: str) -> float:
        """Return when a container first logged an event, in seconds since 1970."""
        first = next(line for line in _log_of(container) if line["event"] == event)
        return datetime.fromisoformat(first["timestamp"]).timestamp()

    def ready_workers(self) -> list[Container]:
        return [worker for worker in self.containers("worker") if self.serves(worker)]

    def serves(self, container: Container, service: str = "ready") -> bool:
        return container.is_running and serves(self.address_of(container), service)

    def leader(self) -> Container | None:
        """Return the leading scheduler; None while there is none."""
        for scheduler in map(self.the, SCHEDULERS):
            if self.serves(scheduler, "lead"):
                return scheduler
        return None

    def status(self) -> GetStatusResponse | None:
        """Return the leader's status; None while there is no leader."""
        leader = self.leader()
        if leader is None:
            return None
        try:
            with Operations(self.address_of(leader)) as operations:
                return operations.status(with_block_maps=False, timeout_s=2.0)
        except QuireError as error:
            # For the report of a test that fails.
            print(f"no status of {leader.service}: {error}")
            return None

    def lanes(self) -> list[WorkerStatus]:
        """Return the leader's workers; empty while there is no leader."""
        status = self.status()
        return list(status.workers) if status else []

    def has_lanes(self, count: int) -> bool:
        return len(self.lanes()) == count

    def is_idle(self) -> bool:
        """Return whether there are workers, all blocks are free, and no request is live."""
        lanes = self.lanes()
        num_held = sum(lane.num_blocks - lane.num_free_blocks for lane in lanes)
        return bool(lanes) and num_held == 0 and not self.pools().live_requests()

    def redis(self) -> redis.Redis:
        address = self.the("redis").addresses[f"{self.name}_store"]
        return redis.Redis(host=address, password=PASSWORD, socket_timeout=5)

    def pools(self) -> PoolWatch:
        return PoolWatch(self.redis())


def crash(container: Container) -> None:
    """Kill the container's process, which Docker then treats as a crash."""
    code = f"import os; os.kill({container.pid}, 9)"
    host = ("--pid=host", "--user=0", "--entrypoint=python")
    docker("run", "--rm", *host, f"{IMAGE}-gateway:latest", "-c", code)


def _inspected(ids: list[str]) -> list[Container]:
    return list(map(Container.inspected, json.loads(docker("inspect", *ids)) if ids else []))


def serves(target: str, service: str = "ready") -> bool:
    """Return whether a health service is SERVING; False if the server does not respond."""
    try:
        return is_serving(target, service, timeout_s=2.0)
    except QuireError as error:
        print(f"no health of {target}: {error}")
        return False


def _compose() -> list[str]:
    if command := os.environ.get("COMPOSE"):
        return shlex.split(command)
    has_v2 = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return ["docker", "compose"] if has_v2 else ["docker-compose"]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as bound:
        servers = [bound.enter_context(socket.socket()) for _ in range(count)]
        for server in servers:
            server.bind(("127.0.0.1", 0))
        return [server.getsockname()[1] for server in servers]
