"""A child process: starts, signals, stops and restarts it."""

import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from quire.launcher import parent_death_signal
from quire.launcher.errors import LaunchError, log_tail

Process: TypeAlias = "subprocess.Popen[bytes]"
# Calls a function that starts a process, in a thread that must not end before the process.
Spawn: TypeAlias = Callable[[Callable[[], Process]], Process]

_STDERR = 2


def in_this_thread(start: Callable[[], Process]) -> Process:
    return start()


class ChildProcess(ABC):
    """A process that does not outlive this one and can be restarted. Thread-safe.

    On Linux it is killed when the thread that `spawn` uses ends.
    """

    def __init__(self, name: str, spawn: Spawn = in_this_thread) -> None:
        self.name = name
        # Whether a supervisor restarts the process when it has ended.
        self.autorestart = True
        self.num_starts = 0
        # Time of the last start, by the monotonic clock.
        self.started_s = 0.0
        self._spawn = spawn
        self._launching = threading.Lock()
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        """Process id, also after the end. LaunchError before the first start."""
        return self._started.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs or is paused."""
        return self._started.poll()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start the process, unless it is alive."""
        with self._launching:
            if not self.is_alive:
                self._process = self._spawn(self._start)
                self.num_starts += 1
                self.started_s = time.monotonic()

    def restart(self) -> None:
        """Kill the process if it is alive, and start it again."""
        self.autorestart = True
        self.kill()
        self._started.wait()
        self.launch()

    def terminate(self) -> None:
        """Send SIGTERM, also to a paused process: a service drains and ends."""
        self._started.terminate()
        self.resume()

    def kill(self) -> None:
        """Send SIGKILL. A supervisor may restart the process."""
        self._started.kill()

    def pause(self) -> None:
        """Send SIGSTOP. The process keeps its connections."""
        self._started.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._started.send_signal(signal.SIGCONT)

    def drain(self, grace_s: float) -> None:
        """Drain and end the process for good; kill it after the grace period."""
        self.autorestart = False
        self.terminate()
        self.wait(grace_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended; kill it after the timeout."""
        try:
            self._started.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._started.wait()

    def check(self) -> None:
        """LaunchError if the process has ended."""
        if self.status is not None:
            raise self.error(f"ended {_describe(self.status)}")

    def error(self, what: str) -> LaunchError:
        tail = "; its log is above" if self._log_file is None else log_tail(self._log_file)
        return LaunchError(f"{self.name} {what}{tail}")

    @property
    @abstractmethod
    def _log_file(self) -> Path | None:
        """The file that receives its output; None is the terminal."""

    @abstractmethod
    def _start(self) -> Process:
        """Start the process."""

    @property
    def _started(self) -> Process:
        if self._process is None:
            raise LaunchError(f"{self.name} has not been started")
        return self._process


def start_with_death_signal(
    command: Sequence[str], log_file: Path | None, environment: Mapping[str, str] | None = None
) -> Process:
    """Start a command that is killed when this thread ends. Appends its output to the file, or
    writes it to the terminal. Without an environment it inherits this process's."""
    append = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    output = _STDERR if log_file is None else os.open(log_file, append, 0o600)
    try:
        return subprocess.Popen(
            with_death_signal(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C in the terminal must reach only this process, which stops tiers in order.
            process_group=0,
        )
    finally:
        if output != _STDERR:
            os.close(output)


def with_death_signal(command: Sequence[str]) -> list[str]:
    """The command, killed when the thread that starts it ends. It keeps the process id."""
    return [sys.executable, "-IS", parent_death_signal.__file__, str(os.getpid()), *command]


def _describe(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
