"""Child processes: one service each, and the group that starts, watches and stops them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import QuireError
from quire.launcher import tether
from quire.launcher.errors import LaunchError
from quire.probe import NOT_SERVING, SERVING, health_of

_POLL_S = 0.05
_LOG_TAIL_LINES = 20
_STDERR = 2


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
    # The health check that fails for good if the model cannot be loaded.
    loading_check: str | None = None


class ServiceProcess:
    """One service as a child process that does not outlive this process."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str | None:
        """Where the service listens; None until it does."""
        path = self.spec.address_file
        return path.read_text() if path.exists() else None

    def is_ready(self) -> bool:
        return self._health_is(SERVING, "ready")

    def check(self) -> None:
        """LaunchError if the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise self.error(f"ended {_describe(status)}")

    def check_start(self) -> None:
        """LaunchError if the process has ended or lives on without a model."""
        self.check()
        loading = self.spec.loading_check
        if loading is not None and self._health_is(NOT_SERVING, loading):
            raise self.error("cannot load the model")

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

    def _health_is(self, status: int, service: str) -> bool:
        """False, too, while nobody answers."""
        try:
            return self.address is not None and health_of(self.address, service, 1.0) == status
        except QuireError:
            return False

    def _log_tail(self) -> str:
        if self.spec.log_file is None:
            return "; its log is above"
        lines = self.spec.log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "; its log ends:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


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

    def wait_until_ready(self, timeout_s: float) -> None:
        """LaunchError as soon as one has ended, or if one is not ready in time."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            while not process.is_ready():
                for each in self._processes:
                    each.check_start()
                if time.monotonic() > deadline:
                    raise process.error(f"is not ready after {timeout_s:g} s")
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

    @property
    def _processes(self) -> list[ServiceProcess]:
        return [process for tier in self._tiers for process in tier]


def _describe(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
