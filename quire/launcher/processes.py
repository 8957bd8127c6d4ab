"""Child processes: one service each, and the group that starts, watches and stops them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import QuireError
from quire.launcher import tether
from quire.launcher.errors import LaunchError
from quire.launcher.logs import log_tail
from quire.probe import NOT_SERVING, SERVING, health_of

_POLL_S = 0.05
# A start that takes no longer needs no words.
_SILENT_S = 3.0
_STDERR = 2


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


class ServiceProcess:
    """One service as a child process that does not outlive this process."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self._process = self._start()
        self._check_passes = False
        self._check_fails_since: float | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str | None:
        """Where the service listens; None until it does."""
        path = self.spec.address_file
        return path.read_text() if path.exists() else None

    def is_ready(self) -> bool:
        return self._health("ready") == SERVING

    def check(self) -> None:
        """LaunchError if the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise self.error(f"ended {_describe(status)}")

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
        return None if check is None or self._check_passes else f"{self.spec.name} to {check.deed}"

    def error(self, what: str) -> LaunchError:
        return LaunchError(f"{self.spec.name} {what}{self._log_tail()}")

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> None:
        """Until the process has ended; it is killed when the time is over."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        log_file = self.spec.log_file
        output = _STDERR if log_file is None else os.open(log_file, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            return subprocess.Popen(
                [sys.executable, "-IS", tether.__file__, str(os.getpid()), *self.spec.command],
                env=self.spec.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A Ctrl-C in the terminal is ours to hand on, in order.
                process_group=0,
            )
        finally:
            if output != _STDERR:
                os.close(output)

    def _health(self, service: str) -> int | None:
        """The status of a health check; None while nobody answers."""
        try:
            return health_of(self.address, service, 1.0) if self.address is not None else None
        except QuireError:
            return None

    def _log_tail(self) -> str:
        log_file = self.spec.log_file
        return "; its log is above" if log_file is None else log_tail(log_file)


class ProcessGroup:
    """Processes in tiers: they start together and stop tier by tier."""

    def __init__(self) -> None:
        self._tiers: list[list[ServiceProcess]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, tier: Sequence[ServiceSpec]) -> list[ServiceProcess]:
        """Starts a tier, which will be stopped after the tiers that were started before it."""
        self._tiers.append([])
        for spec in tier:
            self._tiers[-1].append(ServiceProcess(spec))
        return self._tiers[-1]

    def wait_until_ready(
        self, timeout_s: float, on_wait: Callable[[str], object] | None = None
    ) -> None:
        """LaunchError as soon as one cannot start, or if one is not ready in time.

        A wait that is not short is told to `on_wait` in words that follow "waiting for", at its
        beginning and whenever they change.
        """
        started = time.monotonic()
        said = None
        for process in self._processes:
            while not process.is_ready():
                self._check_start()
                waited_s = time.monotonic() - started
                if waited_s > timeout_s:
                    raise process.error(f"is not ready after {timeout_s:g} s")
                if on_wait and waited_s > _SILENT_S and said != self._awaited:
                    said = self._awaited
                    on_wait(said)
                time.sleep(_POLL_S)

    def check(self) -> None:
        """LaunchError if one has ended."""
        for process in self._processes:
            process.check()

    def stop(self, grace_s: float) -> None:
        """Drains tier after tier; each gets this many seconds before it is killed."""
        for tier in self._tiers:
            for process in tier:
                process.terminate()
            deadline = time.monotonic() + grace_s
            for process in tier:
                process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _check_start(self) -> None:
        for process in self._processes:
            process.check_start()

    @property
    def _awaited(self) -> str:
        awaited = [what for process in self._processes if (what := process.awaited())]
        return ", ".join(awaited) or "the services to find each other"

    @property
    def _processes(self) -> list[ServiceProcess]:
        return [process for tier in self._tiers for process in tier]


def _describe(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
