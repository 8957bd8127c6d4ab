"""Starts Redis, scheduler, simulated workers and load generator in a private directory."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import redis

from benchmarks.scheduler.control import Control
from benchmarks.scheduler.workload import Workload
from quire.launcher.directory import PrivateDirectory
from quire.launcher.processes import ProcessGroup, ServiceSpec
from quire.launcher.redis import EmbeddedRedis

_TIMEOUT_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.05


class BenchmarkError(RuntimeError):
    """The measurement is invalid because a part of the stack failed."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Configuration of the stack."""

    num_workers: int = 1
    # Fields of SimModel for the simulated workers.
    model: Mapping[str, float] = field(default_factory=dict)
    # Flags of the scheduler.
    scheduler: Mapping[str, object] = field(default_factory=dict)


class BenchStack:
    """A stack that is ready within its context and stopped after it."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._undo = ExitStack()
        self._processes = ProcessGroup()
        self.pids: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def run(self, workload: Workload) -> None:
        self.load.call("start", **asdict(workload))

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

    def _start(self) -> None:
        private = PrivateDirectory.make()
        self._undo.callback(private.remove)
        self._directory = directory = private.path
        embedded = self._undo.enter_context(EmbeddedRedis(directory))
        self.redis = redis.Redis(unix_socket_path=str(embedded.socket_path))
        self._undo.callback(self.redis.close)
        self._undo.callback(self._end)
        sockets = [f"{directory}/worker-{i}.sock" for i in range(self._setting.num_workers)]
        scheduler = f"unix:{directory}/scheduler.sock"
        flags = {
            "listen": scheduler,
            "redis-url": embedded.url,
            "workers": ",".join(f"unix:{socket}" for socket in sockets),
            "log-level": "warning",
            **self._setting.scheduler,
        }
        self._launch("scheduler", "probe", *(f"--{key}={value}" for key, value in flags.items()))
        for index, share in enumerate(_shares(sockets)):
            self._launch(
                "workers", "worker_host", json.dumps(dict(self._setting.model)), *share, index=index
            )
        self._launch("load", "load", scheduler)
        self.probe = self._control("scheduler-0")
        self.hosts = [self._control(f"workers-{i}") for i in range(len(self.pids["workers"]))]
        self.load = self._control("load-0")
        self._wait(
            lambda: self.probe.call("find_lanes"), lambda lanes: lanes == len(sockets), _TIMEOUT_S
        )
        self._wait(self.progress, lambda progress: progress["ready"], _TIMEOUT_S)

    def _launch(self, name: str, module: str, *arguments: str, index: int = 0) -> None:
        path = self._directory / f"{name}-{index}"
        spec = ServiceSpec(
            name=path.name,
            command=[
                *(sys.executable, "-m", f"benchmarks.scheduler.{module}"),
                *(f"{path}.control", *arguments),
            ],
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

    def _wait(self, read: Callable[[], Any], done: Callable[[Any], bool], timeout_s: float) -> Any:
        value = self.until(read, done, timeout_s)
        if not done(value):
            raise BenchmarkError(f"timed out after {timeout_s:g} s; last value: {value}")
        return value

    def _end(self) -> None:
        """Stop without draining: there is no state to save."""
        self._processes.kill()
        self._processes.stop(_STOP_S)


def _shares(sockets: list[str]) -> list[list[str]]:
    """Divide the workers among processes: one per core, less two for scheduler and Redis."""
    num_processes = min(len(sockets), max(1, len(os.sched_getaffinity(0)) - 2))
    return [sockets[i::num_processes] for i in range(num_processes)]
