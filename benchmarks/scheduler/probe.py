"""`python -m benchmarks.scheduler.probe CONTROL FLAGS...`: the scheduler service, watched.

It is `python -m scheduler_svc` with the same flags. Two calls that every step makes are wrapped,
for a microsecond or two each: the landing of a result, and a call of Redis.
"""

import gc
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
from scheduler_svc.lanes.flights import Flights, Landing
from scheduler_svc.lanes.lane import Lane
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.scripts import COMMIT, Script
from scheduler_svc.store.wire import Argument

_ADMITTED = COMMIT.args.index("admitted_sequences")


class Probe:
    """What has happened since it was last asked."""

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

    def landed(self, landing: Landing) -> None:
        self._process_s.append(time.process_time())
        self._loop_s.append(time.thread_time())
        self._scheduling_s.append(landing.flight.scheduling_s)
        self._redis_s.append(landing.flight.redis_s)

    def called(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> None:
        self._calls[script.name] += 1
        self._open_calls[keys[0]] += 1
        if script is COMMIT:
            kind = "admitting" if args[_ADMITTED] else "decoding"
            self._steps_by_kind[kind] += 1
            self._calls_by_kind[kind] += self._open_calls.pop(keys[0])

    # Questions; they come on another thread

    def look(self) -> int:
        """Finds the open lanes, whose number it gives; takes too long to be done in between."""
        found = gc.get_objects()
        self._lanes = weakref.WeakSet(other for other in found if isinstance(other, Lane))
        self._connections = weakref.WeakSet(o for o in found if isinstance(o, Connection))
        return len(self._lanes)

    def take(self) -> dict[str, Any]:
        """Figures since the last question, and counters since the start."""
        taken = {
            # Processor time between one landing and the next: of the process, of the loop's thread.
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
            lanes.update(asdict(lane.stats))
        return {**taken, "lanes": lanes, "all_calls": sum(c.num_calls for c in self._connections)}

    @staticmethod
    def alive() -> dict[str, int]:
        """Request objects that something still refers to."""
        gc.collect()
        kinds = Counter(type(found) for found in gc.get_objects())
        return {"groups": kinds[Group], "sequences": kinds[SequenceState]}


def _differences(values: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(values)]


def watch(probe: Probe) -> None:
    """Wraps what the probe wants to hear of."""
    land, run = Flights.land, Connection.run

    def watched_land(flights: Flights, result: worker_pb2.StepResult) -> Landing:
        landing = land(flights, result)
        probe.landed(landing)
        return landing

    async def watched_run(
        connection: Connection, script: Script, keys: Sequence[str], args: Sequence[Argument]
    ) -> Any:
        probe.called(script, keys, args)
        return await run(connection, script, keys, args)

    Flights.land = watched_land  # type: ignore[method-assign, assignment]
    Connection.run = watched_run  # type: ignore[method-assign, assignment]


def main() -> None:
    path = Path(sys.argv.pop(1))
    probe, sampler = Probe(), Sampler()
    watch(probe)
    control.serve(
        path,
        {
            "look": probe.look,
            "take": probe.take,
            "alive": probe.alive,
            "profile": sampler.start,
            "profiled": sampler.stop,
        },
    )
    service.main()


if __name__ == "__main__":
    main()
