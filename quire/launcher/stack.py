"""A local stack: Redis, schedulers, workers and gateways as child processes."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal, Self

from quire.client.errors import QuireError
from quire.client.operations import Operations
from quire.launcher.directory import PrivateDirectory
from quire.launcher.errors import LaunchError
from quire.launcher.gguf_model import model_folder
from quire.launcher.processes import ProcessGroup, ServiceProcess, StartCheck
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.services import ServiceSpecs, check_installed, consecutive_addresses
from quire.launcher.spawner import Spawner
from quire.launcher.supervisor import Supervisor
from quire.service.addresses import reserve

Role = Literal["gateway", "scheduler", "worker"]
# Of one service. The addresses of all workers are one argument of the scheduler, which the system
# limits to 128 KiB.
MAX_PROCESSES = 1024


@dataclass(eq=False)
class LocalStack:
    """A private stack that serves one model, from `start` to `stop` or within a context.

    Internal addresses are unix sockets in a directory that only this user can access. On Linux all
    processes of the stack end with this process, even if it is killed.
    """

    # A folder in Hugging Face format, a GGUF file, or a hub id.
    model: str
    _: KW_ONLY
    num_workers: int = 1
    # One leads, the others stand by.
    num_schedulers: int = 1
    num_gateways: int = 1
    # Port 0 picks a free one. Further gateways get the following ports.
    gateway_listen: str = "127.0.0.1:0"
    # Of the HTTP API; not served if absent. Further gateways get the following ports.
    http_listen: str | None = None
    # A running Redis to use instead of a private one.
    redis_url: str | None = None
    # Makes the private Redis write an append-only file, so that its data survives a restart.
    redis_appendonly: bool = False
    revision: str | None = None
    # The model's name in requests; `model` if absent.
    served_model_name: str | None = None
    # `QUIRE_*` variables for the services; they override those of this process, None removes one.
    settings: Mapping[str, str | None] = field(default_factory=dict)
    # Restarts processes that end, including Redis, as `restart: unless-stopped` does.
    restart: bool = False
    # Writes the services' logs to the terminal.
    verbose: bool = False
    # Includes the download of a model.
    ready_timeout_s: float = 1800.0
    # Seconds that each tier gets to drain; more than the services' own limit.
    stop_grace_s: float = 15.0
    # Seconds for which the scheduler may fail to reach Redis at the start.
    redis_timeout_s: float = 10.0
    # Called during a long start, with what completes "waiting for".
    on_wait: Callable[[str], object] | None = None
    # Called from the beginning, and as often as the progress of an action changes.
    on_progress: Callable[[str], object] | None = None
    # Called in another thread, with how a process ended, before it is restarted.
    on_end: Callable[[LaunchError], object] | None = None

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_schedulers", "num_gateways"):
            number = getattr(self, name)
            if number < 1:
                raise ValueError(f"{name}: must be at least 1 (got {number})")
            if number > MAX_PROCESSES:
                raise ValueError(
                    f"{name}: must be at most {MAX_PROCESSES} on one machine (got {number})"
                )
        self._tiers: dict[Role, list[ServiceProcess]] = {}
        self._processes = ProcessGroup()
        self._redis: EmbeddedRedis | None = None
        self._cleanup = ExitStack()
        self._is_running = False
        self._starter_pid = 0

    @property
    def address(self) -> str:
        """The first gateway's address. LaunchError if the stack is not running."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """The gateways' addresses; joined by commas they are a client's target."""
        return self._addresses("gateway")

    @property
    def http_addresses(self) -> list[str]:
        """The gateways' addresses for HTTP, none without `http_listen`."""
        found = [process.http_address for process in self.processes("gateway")]
        return [address for address in found if address is not None]

    @property
    def scheduler_address(self) -> str:
        """The first scheduler's address. LaunchError if the stack is not running."""
        return self._addresses("scheduler")[0]

    @property
    def pids(self) -> list[int]:
        """Process ids of the services: gateways, schedulers, workers."""
        return self._processes.pids

    def processes(self, role: Role) -> list[ServiceProcess]:
        """The processes of one service. LaunchError if the stack is not running."""
        self._check_running()
        return self._tiers[role]

    @property
    def redis(self) -> EmbeddedRedis:
        """The private Redis. LaunchError if there is none, or the stack is not running."""
        self._check_running()
        if self._redis is None:
            raise LaunchError("the stack has no private Redis")
        return self._redis

    def leader(self) -> ServiceProcess | None:
        """The leading scheduler, the only one that is ready; None if none leads."""
        return next((s for s in self.processes("scheduler") if s.is_alive and s.is_ready()), None)

    def start(self) -> Self:
        """Start the stack and wait until it is ready. LaunchError with the part that is not."""
        check_installed()
        try:
            self._start()
        except BaseException:
            # No request is running, so nothing needs draining.
            self.kill()
            self.stop()
            raise
        return self

    def check(self) -> None:
        """LaunchError if a service has ended and will not be restarted."""
        if not self.restart:
            self._processes.check()

    def stop(self) -> None:
        """Drain and end gateways, schedulers, workers and Redis, in this order. A process that was
        forked from the one that started them leaves them, and their files, to it."""
        self._is_running = False
        if os.getpid() != self._starter_pid:
            self._cleanup.pop_all()
        self._cleanup.close()

    def kill(self) -> None:
        """Kill the services for good; `stop` has to be called as well."""
        self._processes.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _start(self) -> None:
        self._starter_pid = os.getpid()
        self._check_addresses()
        private = PrivateDirectory.make()
        self._cleanup.callback(private.remove)
        spawner = Spawner()
        self._cleanup.callback(spawner.close)
        redis_url = self.redis_url or self._start_redis(private.path, spawner)
        self._processes = ProcessGroup(spawner.call)
        self._cleanup.callback(self._processes.stop, self.stop_grace_s)
        self._start_services(private.path, redis_url)
        self._processes.wait_until_ready(
            self.ready_timeout_s, self.on_wait, self.on_progress, self._check_refused
        )
        self._is_running = True
        if self.restart:
            self._cleanup.callback(self._supervise().close)

    def _check_addresses(self) -> None:
        """LaunchError if a service cannot listen on its addresses, or two of them are the same. The
        services would report it after the model is loaded."""
        # What each port is for.
        uses: dict[str, str] = {}
        with ExitStack() as reserved:
            for use, service, address in self._listening():
                port = address.rpartition(":")[2]
                try:
                    if (held := reserve(address)) is not None:
                        reserved.enter_context(held)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE and port in uses:
                        both = f"{uses[port]} and {use} need different ports"
                        raise LaunchError(f"cannot listen on {address} twice: {both}") from error
                    hint = _hint(use) if error.errno == errno.EADDRINUSE else ""
                    raise LaunchError(f"the {service} {error.strerror}{hint}") from error
                except ValueError:
                    """The service itself reports an invalid address, with its setting."""
                uses[port] = use

    def _listening(self) -> Iterator[tuple[str, Role, str]]:
        """What each address is for, of which service."""
        for use, listen in (("gRPC", self.gateway_listen), ("HTTP", self.http_listen)):
            for address in consecutive_addresses(listen, self.num_gateways) if listen else ():
                yield use, "gateway", address
        services: tuple[Role, ...] = ("gateway", "scheduler")
        for service in services:
            name = f"QUIRE_{service.upper()}_METRICS_LISTEN"
            if metrics_listen := {**os.environ, **self.settings}.get(name):
                yield f"the {service}'s metrics", service, metrics_listen

    def _start_redis(self, directory: Path, spawner: Spawner) -> str:
        redis = EmbeddedRedis(directory, appendonly=self.redis_appendonly, spawn=spawner.call)
        self._redis = redis.start()
        self._cleanup.callback(redis.stop)
        return redis.url

    def _start_services(self, directory: Path, redis_url: str) -> None:
        """Start all services concurrently. They stop in the order of `_tiers`."""
        specs = ServiceSpecs(directory, self.num_workers, self.settings, self.verbose)
        gateways = consecutive_addresses(self.gateway_listen, self.num_gateways)
        schedulers = specs.sockets("scheduler", self.num_schedulers)
        workers = specs.sockets("worker", self.num_workers)
        folder = model_folder(self.model)
        model = {"model": folder, "revision": self.revision}
        gateway_flags = {
            **model,
            "scheduler": ",".join(schedulers),
            "served-model-name": self.served_model_name
            or (None if folder == self.model else Path(self.model).name),
        }
        scheduler_flags = {"redis-url": redis_url, "workers": ",".join(workers)}
        tokenizer = StartCheck("tokenizer", "load the model's tokenizer")
        redis = StartCheck("redis", "reach Redis", self.redis_timeout_s)
        weights = StartCheck("model", "load the model")
        start = self._processes.start
        self._tiers = {
            "gateway": start(
                specs.make("gateway", gateways, gateway_flags, tokenizer, self.http_listen)
            ),
            "scheduler": start(
                specs.make("scheduler", schedulers, scheduler_flags, redis), ready_when=any
            ),
            "worker": start(specs.make("worker", workers, model, weights)),
        }

    def _check_refused(self) -> None:
        """LaunchError if the scheduler refuses a worker: all of them have the same settings."""
        for scheduler in self._tiers["scheduler"]:
            if (address := scheduler.address) is None:
                continue
            with suppress(QuireError), Operations(address) as operations:
                for refused in operations.status(False, timeout_s=1.0).refused_workers:
                    names = [w.name for w in self._tiers["worker"] if w.address == refused.address]
                    name = names[0] if names else refused.address
                    raise LaunchError(f"the scheduler refuses {name}: {refused.reason}")

    def _supervise(self) -> Supervisor:
        redis = [self._redis] if self._redis is not None else []
        return Supervisor([*redis, *self._processes.processes], self.on_end or (lambda _: None))

    def _addresses(self, role: Role) -> list[str]:
        return [address for process in self.processes(role) if (address := process.address)]

    def _check_running(self) -> None:
        if not self._is_running:
            raise LaunchError("the stack is not running")


def _hint(use: str) -> str:
    """What to do if the address of this use is taken, for those that `quire serve` has flags of."""
    flag = {"gRPC": "--port", "HTTP": "--http-port"}.get(use)
    return f"; choose another port with {flag}" if flag else ""
