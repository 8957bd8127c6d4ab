"""Services as child processes, and groups that start, check and stop them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.client.errors import QuireError
from quire.client.health_probe import NOT_SERVING, SERVING, health_of
from quire.launcher.child import (
    ChildProcess,
    Process,
    Spawn,
    in_this_thread,
    start_with_death_signal,
)
from quire.service.progress_file import read_progress

_POLL_S = 0.05
_CHECK_S = 1.0
# A start that is shorter is not reported as a wait.
_SILENT_S = 3.0


@dataclass(frozen=True)
class StartCheck:
    """A health check of a service. If it fails, the start fails."""

    name: str
    # The action that the check covers, as an infinitive: "load the model".
    action: str
    # Seconds for which the check may fail.
    timeout_s: float = 0.0


@dataclass(frozen=True)
class ServiceSpec:
    """How to start a service."""

    name: str
    command: Sequence[str]
    # The service writes its address here once it listens.
    address_file: Path
    # Receives the service's output; None leaves it on the terminal.
    log_file: Path | None
    # The complete environment, as for `subprocess.Popen`.
    environment: Mapping[str, str]
    start_check: StartCheck | None = None
    # The command's `--listen`. Port 0 picks a port, which restarts keep.
    listen: str | None = None
    # The command's `--http-listen`, likewise, and the file for its address; None without HTTP.
    http_listen: str | None = None
    http_address_file: Path | None = None
    # Where the service reports the progress of its start, if it does.
    progress_file: Path | None = None
    # The command's `--health-listen`; None if health is served at its address alone.
    health_listen: str | None = None


class ServiceProcess(ChildProcess):
    """A service as a child process."""

    def __init__(self, spec: ServiceSpec, spawn: Spawn) -> None:
        super().__init__(spec.name, spawn)
        self.spec = spec
        self._bound: str | None = None
        self._check_passes = False
        self._check_fails_since: float | None = None
        self.launch()

    @property
    def address(self) -> str | None:
        """The service's address; None until it listens."""
        if self._bound is None and self.spec.address_file.exists():
            self._bound = self.spec.address_file.read_text()
        return self._bound

    @property
    def http_address(self) -> str | None:
        """The service's address for HTTP; None until it listens, and without HTTP."""
        file = self.spec.http_address_file
        return file.read_text() if file is not None and file.exists() else None

    def is_ready(self) -> bool:
        return self._health("ready") == SERVING

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
        if now - self._check_fails_since >= check.timeout_s:
            raise self.error(f"cannot {check.action}")

    def pending_action(self, with_detail: bool) -> str | None:
        """The action that was not complete at the last `check_start`, with what the service has
        reported: "worker-0 to load the model (downloading)"."""
        check = self.spec.start_check
        if check is None or self._check_passes:
            return None
        file = self.spec.progress_file
        progress = None if file is None else read_progress(file)
        if progress is None:
            return f"{self.name} to {check.action}"
        reported = str(progress) if with_detail else progress.action
        return f"{self.name} to {check.action} ({reported})"

    @property
    def _log_file(self) -> Path | None:
        return self.spec.log_file

    def _start(self) -> Process:
        spec = self.spec
        listen = spec.listen and (self.address or spec.listen)
        self._bound = listen if self.num_starts else None
        spec.address_file.unlink(missing_ok=True)
        if spec.progress_file is not None:
            spec.progress_file.unlink(missing_ok=True)
        flags = [f"--listen={listen}"] if listen is not None else []
        if spec.http_listen is not None:
            flags.append(f"--http-listen={self.http_address or spec.http_listen}")
        if spec.health_listen is not None:
            flags.append(f"--health-listen={spec.health_listen}")
        return start_with_death_signal([*spec.command, *flags], spec.log_file, spec.environment)

    def _health(self, service: str) -> int | None:
        """The status of a health check; None without a response."""
        if self.address is None:
            return None
        try:
            return health_of(self.spec.health_listen or self.address, service, 1.0)
        except QuireError:
            return None


@dataclass(frozen=True)
class ServiceTier:
    """Processes of one service."""

    processes: list[ServiceProcess]
    # `all` or `any`: which of the processes have to be ready for the tier to be ready.
    ready_when: Callable[[Iterable[bool]], bool]

    def is_ready(self) -> bool:
        return self.ready_when(process.is_ready() for process in self.processes)


class ProcessGroup:
    """Tiers of processes, which start concurrently and stop tier by tier."""

    def __init__(self, spawn: Spawn = in_this_thread) -> None:
        self._spawn = spawn
        self._tiers: list[ServiceTier] = []

    @property
    def processes(self) -> list[ServiceProcess]:
        return [process for tier in self._tiers for process in tier.processes]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def start(
        self, specs: Sequence[ServiceSpec], ready_when: Callable[[Iterable[bool]], bool] = all
    ) -> list[ServiceProcess]:
        """Start a tier. It stops after the tiers that were started before it.

        `ready_when` is `any` for a service of which one process leads and the others stand by.
        """
        tier = ServiceTier([], ready_when)
        self._tiers.append(tier)
        for spec in specs:
            tier.processes.append(ServiceProcess(spec, self._spawn))
        return tier.processes

    def wait_until_ready(
        self,
        timeout_s: float,
        on_wait: Callable[[str], object] | None = None,
        on_progress: Callable[[str], object] | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """LaunchError as soon as a process cannot start, or if a tier is not ready in time.

        `on_progress` is called with the pending actions in detail whenever these change. During a
        long wait, `on_wait` is called with the actions alone, at first and when they change.
        `check` is called once a second and may raise a LaunchError, too.
        """
        started = checked_at = time.monotonic()
        reported = shown = ""
        for tier in self._tiers:
            while not tier.is_ready():
                self._check_start()
                if time.monotonic() - checked_at >= _CHECK_S:
                    check()
                    checked_at = time.monotonic()
                waited_s = time.monotonic() - started
                if waited_s > timeout_s:
                    raise tier.processes[0].error(f"is not ready after {timeout_s:g} s")
                pending = self._pending_actions()
                if on_wait and waited_s > _SILENT_S and reported != pending:
                    reported = pending
                    on_wait(reported)
                if on_progress and shown != (detailed := self._pending_actions(with_detail=True)):
                    shown = detailed
                    on_progress(shown)
                time.sleep(_POLL_S)

    def check(self) -> None:
        """LaunchError if a process has ended."""
        for process in self.processes:
            process.check()

    def stop(self, grace_s: float) -> None:
        """Drain tier after tier; kill the processes of a tier after `grace_s` seconds."""
        for tier in self._tiers:
            for process in tier.processes:
                process.autorestart = False
                process.terminate()
            deadline = time.monotonic() + grace_s
            for process in tier.processes:
                process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kill all processes for good."""
        for process in self.processes:
            process.autorestart = False
            process.kill()

    def _check_start(self) -> None:
        for process in self.processes:
            process.check_start()

    def _pending_actions(self, with_detail: bool = False) -> str:
        each = (process.pending_action(with_detail) for process in self.processes)
        pending = [action for action in each if action]
        return ", ".join(pending) or "the services to connect to each other"
