"""Starts Redis, scheduler, simulated workers and load generator in a private directory."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from benchmarks.scheduler.control import Control
from benchmarks.scheduler.loaded_stack import LoadedStack
from benchmarks.scheduler.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Configuration of the stack."""

    num_workers: int = 1
    # Fields of SimModel for the simulated workers.
    model: Mapping[str, float] = field(default_factory=dict)
    # Flags of the scheduler.
    scheduler: Mapping[str, object] = field(default_factory=dict)


class BenchStack(LoadedStack):
    """One scheduler with a probe inside, and its workers."""

    # Of the scheduler.
    probe: Control

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting

    def run(self, workload: Workload) -> None:
        self.load.call("start", **asdict(workload))

    def _start(self, redis_url: str) -> None:
        directory = self._directory
        sockets = [f"{directory}/worker-{i}.sock" for i in range(self._setting.num_workers)]
        scheduler = f"unix:{directory}/scheduler.sock"
        flags = {
            "listen": scheduler,
            "redis-url": redis_url,
            "workers": ",".join(f"unix:{socket}" for socket in sockets),
            "log-level": "warning",
            **self._setting.scheduler,
        }
        given = (f"--{key}={value}" for key, value in flags.items())
        self._launch_module("scheduler", "probe", *given)
        for index, share in enumerate(_shares(sockets)):
            self._launch_module(
                "workers", "worker_host", json.dumps(dict(self._setting.model)), *share, index=index
            )
        self._launch_module("load", "load", scheduler)
        self.probe = self._control("scheduler-0")
        self.hosts = [self._control(f"workers-{i}") for i in range(len(self.pids["workers"]))]
        self.load = self._control("load-0")
        self._wait(lambda: self.probe.call("find_lanes"), lambda lanes: lanes == len(sockets))
        self._wait(self.progress, lambda progress: progress["ready"])


def _shares(sockets: list[str]) -> list[list[str]]:
    """Divide the workers among processes: one per core, less two for scheduler and Redis."""
    num_processes = min(len(sockets), max(1, len(os.sched_getaffinity(0)) - 2))
    return [sockets[i::num_processes] for i in range(num_processes)]
