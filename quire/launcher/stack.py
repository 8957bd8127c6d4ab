"""A whole Quire on this machine: Redis, schedulers, workers and gateways as child processes."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal, Self

from quire.launcher.directory import PrivateDirectory
from quire.launcher.errors import LaunchError
from quire.launcher.extras import check_installed
from quire.launcher.processes import ProcessGroup, ServiceProcess
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.services import Services
from quire.launcher.spawner import Spawner
from quire.launcher.supervisor import Supervisor

Role = Literal["gateway", "scheduler", "worker"]


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
    # One of them leads, the others stand by.
    num_schedulers: int = 1
    num_gateways: int = 1
    # Port 0 picks a free one; further gateways have the ports that follow, or free ones, too.
    gateway_listen: str = "127.0.0.1:0"
    # Without one the stack has a Redis of its own.
    redis_url: str | None = None
    # The stack's own Redis keeps a file, so that it may be killed and started again.
    redis_appendonly: bool = False
    revision: str | None = None
    # What requests call the model; as `model` if absent.
    served_model_name: str | None = None
    # `QUIRE_*` variables for the services, over those of this process.
    settings: Mapping[str, str] = field(default_factory=dict)
    # Processes that end, Redis as well, are started again, as `restart: unless-stopped` does it.
    restart: bool = False
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
    # Hears, in another thread, how a process ended that is started again.
    on_end: Callable[[LaunchError], object] | None = None

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_schedulers", "num_gateways"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1 (got {getattr(self, name)})")
        self._tiers: dict[Role, list[ServiceProcess]] = {}
        self._processes = ProcessGroup()
        self._redis: EmbeddedRedis | None = None
        self._undo = ExitStack()
        self._is_running = False

    @property
    def address(self) -> str:
        """Where the first gateway serves the public API. LaunchError if the stack is not
        running."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """Where each gateway serves the public API; joined by commas they are a client's target."""
        return self._addresses("gateway")

    @property
    def scheduler_address(self) -> str:
        """Where operators ask, if there is one scheduler. LaunchError if the stack is not
        running."""
        return self._addresses("scheduler")[0]

    @property
    def pids(self) -> list[int]:
        """Process ids of the services: gateways, schedulers, workers."""
        return self._processes.pids

    def processes(self, role: Role) -> list[ServiceProcess]:
        """The services of one kind, to be killed, paused and started again. LaunchError if the
        stack is not running."""
        self._check_running()
        return self._tiers[role]

    @property
    def redis(self) -> EmbeddedRedis:
        """The stack's own Redis, likewise. LaunchError if it has none, or is not running."""
        self._check_running()
        if self._redis is None:
            raise LaunchError("the stack has no Redis of its own")
        return self._redis

    def leader(self) -> ServiceProcess | None:
        """The scheduler that leads: those that stand by are not ready. None where none does now."""
        return next((s for s in self.processes("scheduler") if s.is_alive and s.is_ready()), None)

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
        """LaunchError if a service has ended and nobody starts it again."""
        if not self.restart:
            self._processes.check()

    def stop(self) -> None:
        """Drains and ends gateways, schedulers, workers and Redis, in this order."""
        self._is_running = False
        self._undo.close()

    def kill(self) -> None:
        """Ends the services at once and for good; `stop` is still to be called."""
        self._processes.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _start(self) -> None:
        private = PrivateDirectory.make()
        self._undo.callback(private.remove)
        spawner = Spawner()
        self._undo.callback(spawner.close)
        redis_url = self.redis_url or self._start_redis(private.path, spawner)
        self._processes = ProcessGroup(spawner.call)
        self._undo.callback(self._processes.stop, self.stop_grace_s)
        self._start_services(private.path, redis_url)
        self._processes.wait_until_ready(self.ready_timeout_s, self.on_wait)
        self._is_running = True
        if self.restart:
            self._undo.callback(self._supervise().close)

    def _start_redis(self, directory: Path, spawner: Spawner) -> str:
        redis = EmbeddedRedis(directory, appendonly=self.redis_appendonly, spawn=spawner.call)
        self._redis = redis.start()
        self._undo.callback(redis.stop)
        return redis.url

    def _start_services(self, directory: Path, redis_url: str) -> None:
        """Starts all of them at once, in the order in which they are to stop."""
        services = Services(
            directory=directory,
            model=self.model,
            revision=self.revision,
            served_model_name=self.served_model_name,
            num_workers=self.num_workers,
            num_schedulers=self.num_schedulers,
            num_gateways=self.num_gateways,
            gateway_listen=self.gateway_listen,
            redis_url=redis_url,
            redis_patience_s=self.redis_patience_s,
            settings=self.settings,
            verbose=self.verbose,
        )
        self._tiers = {
            "gateway": self._processes.start(services.gateways()),
            "scheduler": self._processes.start(services.schedulers(), enough=any),
            "worker": self._processes.start(services.workers()),
        }

    def _supervise(self) -> Supervisor:
        redis = [self._redis] if self._redis is not None else []
        return Supervisor([*redis, *self._processes.processes], self.on_end or _say_nothing)

    def _addresses(self, role: Role) -> list[str]:
        return [address for process in self.processes(role) if (address := process.address)]

    def _check_running(self) -> None:
        if not self._is_running:
            raise LaunchError("the stack is not running")


def _say_nothing(_: LaunchError) -> None:
    """Restarts are nothing to speak of."""
