"""Services as child processes, and the group that starts, watches and stops them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import QuireError
from quire.launcher.child import ChildProcess, Process, Spawn, in_this_thread, start_tethered
from quire.probe import NOT_SERVING, SERVING, health_of

_POLL_S = 0.05
# A start that takes no longer needs no words.
_SILENT_S = 3.0


@dataclass(frozen=True)
class StartCheck:
    """A health check of a service whose failure ends the start."""

    name: str
    # What the service does until the check passes: "load the model".
    deed: str
    # Seconds that the check may fail before it counts.
    patience_s: float = 0.0


@dataclass(frozen=True)
class ServiceSpec:
    """What is to be run. The service writes its address into `address_file` once it listens."""

    name: str
    command: Sequence[str]
    address_file: Path
    # Receives what the service writes; None leaves it on the terminal.
    log_file: Path | None
    # All of it, as for `subprocess.Popen`.
    environment: Mapping[str, str]
    start_check: StartCheck | None = None
    # Becomes the command's `--listen`. A port that is left open is the same at every start.
    listen: str | None = None


class ServiceProcess(ChildProcess):
    """One service as a child process."""

    def __init__(self, spec: ServiceSpec, spawn: Spawn = in_this_thread) -> None:
        super().__init__(spec.name, spawn)
        self.spec = spec
        self._bound: str | None = None
        self._check_passes = False
        self._check_fails_since: float | None = None
        self.launch()

    @property
    def address(self) -> str | None:
        """Where the service listens; None until that is known."""
        if self._bound is None and self.spec.address_file.exists():
            self._bound = self.spec.address_file.read_text()
        return self._bound

    def is_ready(self) -> bool:
        return self._health("ready") == SERVING

    def wait_until_ready(self, timeout_s: float) -> None:
        """LaunchError if the process is not ready in time; it may end meanwhile, and come back."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise self.error(f"is not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def check_start(self) -> None:
        """LaunchError if the process has ended or its start check has failed for too long."""
        self.check()
        check = self.spec.start_check
        if check is None:
            return
        status = self._health(check.name)
        self._check_passes = status == SERVING
        if status != NOT_SERVING:
            self._check_fails_since = None
            return
        now = time.monotonic()
        self._check_fails_since = self._check_fails_since or now
        if now - self._check_fails_since >= check.patience_s:
            raise self.error(f"cannot {check.deed}")

    def awaited(self) -> str | None:
        """What the service was still to do at the last `check_start`."""
        check = self.spec.start_check
        return None if check is None or self._check_passes else f"{self.name} to {check.deed}"

    @property
    def _log_file(self) -> Path | None:
        return self.spec.log_file

    def _start(self) -> Process:
        spec = self.spec
        listen = spec.listen and (self.address or spec.listen)
        self._bound = listen if self.num_starts else None
        spec.address_file.unlink(missing_ok=True)
        flags = [f"--listen={listen}"] if listen is not None else []
        return start_tethered([*spec.command, *flags], spec.log_file, spec.environment)

    def _health(self, service: str) -> int | None:
        """The status of a health check; None while nobody answers."""
        try:
            return health_of(self.address, service, 1.0) if self.address is not None else None
        except QuireError:
            return None


@dataclass(frozen=True)
class Tier:
    """Services of one kind."""

    processes: list[ServiceProcess]
    # Of whether each is ready: whether the tier is.
    enough: Callable[[Iterable[bool]], bool]

    def is_ready(self) -> bool:
        return self.enough(process.is_ready() for process in self.processes)


class ProcessGroup:
    """Processes in tiers: they start together and stop tier by tier."""

    def __init__(self, spawn: Spawn = in_this_thread) -> None:
        self._spawn = spawn
        self._tiers: list[Tier] = []

    @property
    def processes(self) -> list[ServiceProcess]:
        return [process for tier in self._tiers for process in tier.processes]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def start(
        self, specs: Sequence[ServiceSpec], enough: Callable[[Iterable[bool]], bool] = all
    ) -> list[ServiceProcess]:
        """Starts a tier, which will be stopped after the tiers that were started before it.
        `enough` is `any` where the others of the tier stand by until that one ends."""
        tier = Tier([], enough)
        self._tiers.append(tier)
        for spec in specs:
            tier.processes.append(ServiceProcess(spec, self._spawn))
        return tier.processes

    def wait_until_ready(
        self, timeout_s: float, on_wait: Callable[[str], object] | None = None
    ) -> None:
        """LaunchError as soon as one cannot start, or if a tier is not ready in time.

        A wait that is not short is told to `on_wait` in words that follow "waiting for", at its
        beginning and whenever they change.
        """
        started = time.monotonic()
        said = None
        for tier in self._tiers:
            while not tier.is_ready():
                self._check_start()
                waited_s = time.monotonic() - started
                if waited_s > timeout_s:
                    raise tier.processes[0].error(f"is not ready after {timeout_s:g} s")
                if on_wait and waited_s > _SILENT_S and said != self._awaited:
                    said = self._awaited
                    on_wait(said)
                time.sleep(_POLL_S)

    def check(self) -> None:
        """LaunchError if one has ended."""
        for process in self.processes:
            process.check()

    def stop(self, grace_s: float) -> None:
        """Drains tier after tier; each gets this many seconds before it is killed."""
        for tier in self._tiers:
            for process in tier.processes:
                process.retired = True
                process.terminate()
            deadline = time.monotonic() + grace_s
            for process in tier.processes:
                process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Ends all for good, at once."""
        for process in self.processes:
            process.retired = True
            process.kill()

    def _check_start(self) -> None:
        for process in self.processes:
            process.check_start()

    @property
    def _awaited(self) -> str:
        awaited = [what for process in self.processes if (what := process.awaited())]
        return ", ".join(awaited) or "the services to find each other"
