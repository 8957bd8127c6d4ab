"""One child process: how it is started, signalled, and started again."""

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

from quire.launcher import tether
from quire.launcher.errors import LaunchError
from quire.launcher.logs import log_tail

Process: TypeAlias = "subprocess.Popen[bytes]"
# Runs a function that starts a process, in a thread that lives as long as that is to.
Spawn: TypeAlias = Callable[[Callable[[], Process]], Process]

_STDERR = 2


def in_this_thread(start: Callable[[], Process]) -> Process:
    return start()


class ChildProcess(ABC):
    """A process that does not outlive this one, and may be started again when it has ended.

    Whoever supervises it starts it again by `launch` unless it is retired. On Linux it dies with
    the thread that `spawn` uses. Safe to use from several threads.
    """

    def __init__(self, name: str, spawn: Spawn = in_this_thread) -> None:
        self.name = name
        # It was told to end, and is not to be started again by a supervisor.
        self.retired = False
        # How often it has been started, and when last, by the monotonic clock.
        self.num_starts = 0
        self.started_s = 0.0
        self._spawn = spawn
        self._launching = threading.Lock()
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        """Of the present process, or of the one that has ended. LaunchError before the first."""
        return self._started.pid

    @property
    def status(self) -> int | None:
        """How it ended, negative for a signal; None while it runs, paused or not."""
        return self._started.poll()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Starts the process with the flags that it always has; does nothing if it is alive."""
        with self._launching:
            if not self.is_alive:
                self._process = self._spawn(self._start)
                self.num_starts += 1
                self.started_s = time.monotonic()

    def restart(self) -> None:
        """Kills the process if it is alive, and starts it again."""
        self.retired = False
        self.kill()
        self._started.wait()
        self.launch()

    def terminate(self) -> None:
        """SIGTERM, also to a process that is paused: a service drains and ends."""
        self._started.terminate()
        self.resume()

    def kill(self) -> None:
        """SIGKILL. The process may be started again by its supervisor."""
        self._started.kill()

    def pause(self) -> None:
        """SIGSTOP: the process does nothing more, and keeps its connections."""
        self._started.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: a process that was paused goes on as if nothing had been."""
        self._started.send_signal(signal.SIGCONT)

    def retire(self, grace_s: float) -> None:
        """Has it drain and end for good; it is killed when the time is over."""
        self.retired = True
        self.terminate()
        self.wait(grace_s)

    def wait(self, timeout_s: float) -> None:
        """Until the process has ended; it is killed when the time is over."""
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
        return LaunchError(f"{self.name} {what}{self._log_tail()}")

    @property
    @abstractmethod
    def _log_file(self) -> Path | None:
        """What receives its output; None if that goes to the terminal."""

    @abstractmethod
    def _start(self) -> Process:
        """Starts the process, once more."""

    @property
    def _started(self) -> Process:
        if self._process is None:
            raise LaunchError(f"{self.name} has not been started")
        return self._process

    def _log_tail(self) -> str:
        return "; its log is above" if self._log_file is None else log_tail(self._log_file)


def start_tethered(
    command: Sequence[str], log_file: Path | None, environment: Mapping[str, str] | None = None
) -> Process:
    """Starts a command that ends with this thread; its log goes behind what the file has, or to
    the terminal. The environment is this process's own if absent."""
    output = _STDERR if log_file is None else _open_log(log_file)
    try:
        return subprocess.Popen(
            [sys.executable, "-IS", tether.__file__, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A Ctrl-C in the terminal is ours to hand on, in order.
            process_group=0,
        )
    finally:
        if output != _STDERR:
            os.close(output)


def _open_log(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)


def _describe(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
