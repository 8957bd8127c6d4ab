"""Processes of one measurement in a private directory: Redis, workers, the load generator."""

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import redis

from benchmarks.scheduler.control import Control
from quire.launcher.directory import PrivateDirectory
from quire.launcher.processes import ProcessGroup, ServiceSpec
from quire.launcher.redis import EmbeddedRedis

_TIMEOUT_S = 90.0
_STOP_S = 10.0
_POLL_S = 0.05


class BenchmarkError(RuntimeError):
    """The measurement is invalid because a part of the stack failed."""


class LoadedStack(ABC):
    """A stack that is ready within its context and stopped after it."""

    redis: redis.Redis
    # Of the load generator, and of the processes with workers.
    load: Control
    hosts: list[Control]

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._processes = ProcessGroup()
        # By tier.
        self.pids: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        try:
            private = PrivateDirectory.make()
            self._undo.callback(private.remove)
            self._directory = private.path
            embedded = self._undo.enter_context(EmbeddedRedis(self._directory))
            self.redis = redis.Redis(unix_socket_path=str(embedded.socket_path))
            self._undo.callback(self.redis.close)
            self._undo.callback(self._end)
            self._start(embedded.url)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    @abstractmethod
    def _start(self, redis_url: str) -> None:
        """Start all processes and wait until they are ready."""

    def progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = self.load.call("progress")
        if progress["failures"]:
            raise BenchmarkError(f"requests failed: {progress['failures']}")
        return progress

    def wait_for(self, key: str, number: int, timeout_s: float) -> dict[str, Any]:
        """Wait until a counter of the load generator reaches `number`; return its progress."""
        reached: dict[str, Any] = self._wait(
            self.progress, lambda progress: progress[key] >= number, timeout_s
        )
        return reached

    def until(self, read: Callable[[], Any], done: Callable[[Any], bool], timeout_s: float) -> Any:
        """Poll `read` until `done` or the timeout; return the last value."""
        deadline_s = time.monotonic() + timeout_s
        while not done(value := read()) and time.monotonic() < deadline_s:
            self._processes.check()
            time.sleep(_POLL_S)
        return value

    def check(self) -> None:
        """BenchmarkError if a plan broke a rule, LaunchError if a process has ended."""
        self._processes.check()
        violations = [found for host in self.hosts for found in host.call("violations")]
        if violations:
            raise BenchmarkError(f"plans broke rules of paged attention: {violations[:3]}")

    def _launch_module(self, name: str, module: str, *arguments: str, index: int = 0) -> None:
        """Launch a module of this folder that is controlled by a socket."""
        control = f"{self._directory}/{name}-{index}.control"
        command = [sys.executable, "-m", f"benchmarks.scheduler.{module}", control, *arguments]
        self._launch(name, index, command)

    def _launch(self, name: str, index: int, command: list[str]) -> None:
        path = self._directory / f"{name}-{index}"
        spec = ServiceSpec(
            name=path.name,
            command=command,
            address_file=Path(f"{path}.address"),
            log_file=Path(f"{path}.log"),
            # Keep the caller's Quire settings out of the measurement.
            environment={k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")},
        )
        [process] = self._processes.start([spec])
        self.pids.setdefault(name, []).append(process.pid)

    def _control(self, name: str) -> Control:
        control = Control(
            Path(f"{self._directory}/{name}.control"), _TIMEOUT_S, self._processes.check
        )
        self._undo.callback(control.close)
        return control

    def _wait(
        self,
        read: Callable[[], Any],
        done: Callable[[Any], bool],
        timeout_s: float = _TIMEOUT_S,
    ) -> Any:
        value = self.until(read, done, timeout_s)
        if not done(value):
            raise BenchmarkError(f"timed out after {timeout_s:g} s; last value: {value}")
        return value

    def _end(self) -> None:
        """Stop without draining: there is no state to save."""
        self._processes.kill()
        self._processes.stop(_STOP_S)
