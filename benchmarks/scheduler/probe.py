"""`python -m benchmarks.scheduler.probe CONTROL FLAGS...`: the scheduler with instrumentation.

Runs `python -m scheduler_svc` with the same flags. Wraps two calls of each step, which costs a
microsecond or two each: the completion of a step, and Redis calls.
"""

import gc
import re
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.scheduler import control
from benchmarks.scheduler.sampler import Sampler
from quire.internal.v1 import worker_pb2
from scheduler_svc import __main__ as service
from scheduler_svc.core.sequence import Group
from scheduler_svc.core.sequence import Sequence as SequenceState
from scheduler_svc.lane.in_flight import CompletedStep, InFlightStep, InFlightSteps
from scheduler_svc.lane.lane import Lane
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.decode_commits import DecodeCommits
from scheduler_svc.store.keys import PoolKeys
from scheduler_svc.store.resp import Argument
from scheduler_svc.store.scripts import COMMIT, Script

# Place of the admitted sequences in the ARGV of commit.lua, from 0.
_ADMITTED = int(re.findall(r"(\d+) admitted_sequences", COMMIT.header)[0]) - 1


class Probe:
    """Counters since the last reading."""

    def __init__(self) -> None:
        self._clear()
        # Calls of each pool since its last commit, by the name of its first key.
        self._open_calls: Counter[str] = Counter()
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()

    def _clear(self) -> None:
        # One entry per step.
        self._process_s: list[float] = []
        self._loop_s: list[float] = []
        self._scheduling_s: list[float] = []
        self._redis_s: list[float] = []
        # Calls by script; steps and their calls by kind.
        self._calls: Counter[str] = Counter()
        self._steps_by_kind: Counter[str] = Counter()
        self._calls_by_kind: Counter[str] = Counter()

    def record_completion(self, in_flight: InFlightStep) -> None:
        self._process_s.append(time.process_time())
        self._loop_s.append(time.thread_time())
        self._scheduling_s.append(in_flight.scheduling_s)
        self._redis_s.append(in_flight.redis_s)

    def record_decode_commit(self, keys: PoolKeys) -> None:
        self._calls[COMMIT.name] += 1
        self._steps_by_kind["decoding"] += 1
        self._calls_by_kind["decoding"] += 1 + self._open_calls.pop(keys.state, 0)

    def record_call(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> None:
        self._calls[script.name] += 1
        self._open_calls[keys[0]] += 1
        if script is COMMIT:
            kind = "admitting" if args[_ADMITTED] else "decoding"
            self._steps_by_kind[kind] += 1
            self._calls_by_kind[kind] += self._open_calls.pop(keys[0])

    # The methods below are called on the control thread.

    def find_lanes(self) -> int:
        """Find the open lanes and return their number. Too slow to run during a measurement."""
        found = gc.get_objects()
        self._lanes = weakref.WeakSet(other for other in found if isinstance(other, Lane))
        self._connections = weakref.WeakSet(o for o in found if isinstance(o, Connection))
        return len(self._lanes)

    def collect(self) -> dict[str, Any]:
        """Return figures since the last reading, and counters since the start."""
        figures = {
            # CPU time between step completions: of the process, of the loop's thread.
            "process_s": _differences(self._process_s),
            "loop_s": _differences(self._loop_s),
            "scheduling_s": self._scheduling_s,
            "redis_s": self._redis_s,
            "calls": self._calls,
            "steps_by_kind": self._steps_by_kind,
            "calls_by_kind": self._calls_by_kind,
        }
        self._clear()
        lanes: Counter[str] = Counter()
        for lane in self._lanes:
            totals = asdict(lane.stats).items()
            lanes.update({name: total for name, total in totals if not isinstance(total, Counter)})
        return {**figures, "lanes": lanes, "all_calls": sum(c.num_calls for c in self._connections)}

    @staticmethod
    def alive() -> dict[str, int]:
        """Count the request objects that are still referenced."""
        gc.collect()
        kinds = Counter(type(found) for found in gc.get_objects())
        return {"groups": kinds[Group], "sequences": kinds[SequenceState]}


def _differences(values: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(values)]


def watch(probe: Probe) -> None:
    """Wrap the completion of steps and Redis calls."""
    complete, take = InFlightSteps.complete, InFlightSteps.take_oldest
    run, begin = Connection.run, DecodeCommits.begin

    def recorded_complete(steps: InFlightSteps, result: worker_pb2.StepResult) -> CompletedStep:
        completed = complete(steps, result)
        probe.record_completion(completed.in_flight)
        return completed

    def recorded_take(steps: InFlightSteps) -> InFlightStep:
        taken = take(steps)
        probe.record_completion(taken)
        return taken

    async def recorded_run(
        connection: Connection, script: Script, keys: Sequence[str], args: Sequence[Argument]
    ) -> Any:
        probe.record_call(script, keys, args)
        return await run(connection, script, keys, args)

    def recorded_begin(commits: DecodeCommits, *args: Any) -> bool:
        probe.record_decode_commit(commits.keys)
        return begin(commits, *args)

    InFlightSteps.complete = recorded_complete  # type: ignore[method-assign, assignment]
    InFlightSteps.take_oldest = recorded_take  # type: ignore[method-assign, assignment]
    Connection.run = recorded_run  # type: ignore[method-assign, assignment]
    DecodeCommits.begin = recorded_begin  # type: ignore[method-assign, assignment]


def main() -> None:
    path = Path(sys.argv.pop(1))
    probe, sampler = Probe(), Sampler()
    watch(probe)
    control.serve(
        path,
        {
            "find_lanes": probe.find_lanes,
            "collect": probe.collect,
            "alive": probe.alive,
            "start_profile": sampler.start,
            "stop_profile": sampler.stop,
        },
    )
    service.main()


if __name__ == "__main__":
    main()
