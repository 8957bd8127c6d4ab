"""A whole Quire on this machine: Redis, a scheduler, workers and a gateway as child processes."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Self

from quire.launcher.directory import PrivateDirectory
from quire.launcher.errors import LaunchError
from quire.launcher.extras import check_installed
from quire.launcher.processes import ProcessGroup, ServiceProcess, ServiceSpec, StartCheck
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.spawner import Spawner


@dataclass(eq=False)
class LocalStack:
    """A private stack that serves one model, from `start` to `stop` or within the context.

    Internal addresses are unix sockets in a directory that only this user can enter. On Linux no
    process of the stack outlives this one, whatever way it ends.
    """

    # A folder in Hugging Face format, or a hub id.
    model: str
    _: KW_ONLY
    num_workers: int = 1
    # Port 0 picks a free one.
    gateway_listen: str = "127.0.0.1:0"
    # Without one the stack has a Redis of its own.
    redis_url: str | None = None
    revision: str | None = None
    # What requests call the model; as `model` if absent.
    served_model_name: str | None = None
    # `QUIRE_*` variables for the services, over those of this process.
    settings: Mapping[str, str] = field(default_factory=dict)
    # Leaves the services' logs on the terminal.
    verbose: bool = False
    # A model may have to be fetched first.
    ready_timeout_s: float = 1800.0
    # What each tier of services gets to drain; a little more than it gives itself.
    stop_grace_s: float = 15.0
    # How long the scheduler may fail to reach Redis before the start has failed.
    redis_patience_s: float = 10.0
    # Hears what a long start waits for, in words that follow "waiting for".
    on_wait: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers: must be at least 1 (got {self.num_workers})")
        self._processes = ProcessGroup()
        self._undo = ExitStack()
        self._address: str | None = None
        self._scheduler_address: str | None = None

    @property
    def address(self) -> str:
        """Where the public API is served. LaunchError if the stack is not running."""
        return _running(self._address)

    @property
    def scheduler_address(self) -> str:
        """Where operators ask. LaunchError if the stack is not running."""
        return _running(self._scheduler_address)

    @property
    def pids(self) -> list[int]:
        """Process ids of the services: gateway, scheduler, workers."""
        return self._processes.pids

    def start(self) -> Self:
        """Returns when the whole stack is ready; LaunchError says which part is not, and why."""
        check_installed()
        try:
            self._start()
        except BaseException:
            # Nothing is running yet that deserves to be drained.
            self.kill()
            self.stop()
            raise
        return self

    def check(self) -> None:
        """LaunchError if a service has ended."""
        self._processes.check()

    def stop(self) -> None:
        """Drains and ends gateway, scheduler, workers and Redis, in this order."""
        self._address = self._scheduler_address = None
        self._undo.close()

    def kill(self) -> None:
        """Ends the services at once; `stop` is still to be called."""
        self._processes.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _start(self) -> None:
        private = PrivateDirectory.make()
        self._undo.callback(private.remove)
        directory = private.path
        spawner = Spawner()
        self._undo.callback(spawner.close)
        redis_url = self.redis_url or spawner.call(lambda: self._start_redis(directory))
        self._processes = ProcessGroup()
        self._undo.callback(self._processes.stop, self.stop_grace_s)
        gateway = spawner.call(lambda: self._start_services(directory, redis_url))
        self._processes.wait_until_ready(self.ready_timeout_s, self.on_wait)
        self._address = gateway.address
        self._scheduler_address = _scheduler_socket(directory)

    def _start_redis(self, directory: Path) -> str:
        redis = EmbeddedRedis(directory)
        redis.start()
        self._undo.callback(redis.stop)
        return redis.url

    def _start_services(self, directory: Path, redis_url: str) -> ServiceProcess:
        """Starts all of them at once, in the order in which they are to stop; gives the gateway."""
        scheduler = _scheduler_socket(directory)
        workers = [f"unix:{directory}/worker-{i}.sock" for i in range(self.num_workers)]
        [gateway] = self._processes.start([self._gateway(directory, scheduler)])
        self._processes.start([self._scheduler(directory, scheduler, redis_url, workers)])
        self._processes.start([self._worker(directory, address) for address in workers])
        return gateway

    def _gateway(self, directory: Path, scheduler: str) -> ServiceSpec:
        flags = {
            "listen": self.gateway_listen,
            "scheduler": scheduler,
            "model": self.model,
            "revision": self.revision,
            "served-model-name": self.served_model_name,
        }
        return self._spec("gateway", directory, flags)

    def _scheduler(
        self, directory: Path, listen: str, redis_url: str, workers: Sequence[str]
    ) -> ServiceSpec:
        flags = {"listen": listen, "redis-url": redis_url, "workers": ",".join(workers)}
        return self._spec("scheduler", directory, flags)

    def _worker(self, directory: Path, listen: str) -> ServiceSpec:
        flags = {"listen": listen, "model": self.model, "revision": self.revision}
        return self._spec("worker", directory, flags, Path(listen).stem)

    def _spec(
        self, service: str, directory: Path, flags: Mapping[str, str | None], name: str = ""
    ) -> ServiceSpec:
        name = name or service
        address_file = directory / f"{name}.address"
        given = {key: value for key, value in flags.items() if value is not None}
        arguments = [f"--{key}={value}" for key, value in given.items()]
        return ServiceSpec(
            name=name,
            command=[
                *(sys.executable, "-m", f"{service}_svc"),
                *arguments,
                f"--address-file={address_file}",
            ],
            address_file=address_file,
            log_file=None if self.verbose else directory / f"{name}.log",
            environment=self._environment(service),
            start_check=self._start_check(service),
        )

    def _start_check(self, service: str) -> StartCheck:
        checks = {
            "gateway": StartCheck("tokenizer", "load the model's tokenizer"),
            "scheduler": StartCheck("redis", "reach Redis", self.redis_patience_s),
            "worker": StartCheck("model", "load the model"),
        }
        return checks[service]

    def _environment(self, service: str) -> dict[str, str]:
        """What a person wants to read, and an equal share of the cores for each worker; what the
        environment says goes first."""
        threads = max(1, (os.cpu_count() or 1) // self.num_workers)
        defaults = {
            f"QUIRE_{service.upper()}_LOG_FORMAT": "human",
            "QUIRE_WORKER_THREADS": str(threads),
        }
        return {**defaults, **os.environ, **self.settings}


def _running(address: str | None) -> str:
    if address is None:
        raise LaunchError("the stack is not running")
    return address


def _scheduler_socket(directory: Path) -> str:
    return f"unix:{directory}/scheduler.sock"
