"""The ranks of a worker, as processes that can be killed and stopped."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.stack import ChaosStack, NotSteadyError
from quire.launcher.processes import ServiceProcess

# How a worker ends that has lost a rank.
_RANK_LOST = "with status 3"
_KILLED = "by SIGKILL"
_PAUSE_S = 5.0
_RESTART_S = 10.0
# From the start of the process until after its model is loaded.
_LOADING_S = (0.0, 8.0)
_POLL_S = 0.02
_FOLLOWER = b"worker_svc.ranks"


@dataclass(frozen=True)
class _Rank:
    """One process of a worker: rank 0, which is the worker to its peers, or a follower."""

    worker: ServiceProcess
    pid: int

    @property
    def is_first(self) -> bool:
        return self.pid == self.worker.pid

    @property
    def name(self) -> str:
        kind = "rank 0" if self.is_first else "a follower"
        return f"{kind} of {self.worker.name} (pid {self.pid})"

    @property
    def end(self) -> str:
        """How the worker ends if this rank is lost."""
        return _KILLED if self.is_first else _RANK_LOST

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


async def kill_rank(stack: ChaosStack, rng: random.Random) -> str:
    return _kill(stack, _choose(rng.choice(stack.local.processes("worker")), rng))


async def pause_rank(stack: ChaosStack, rng: random.Random) -> str:
    """Rank 0 continues afterwards. A follower is silent for so long that rank 0 has ended both."""
    rank = _choose(rng.choice(stack.local.processes("worker")), rng)
    if not rank.is_first:
        stack.expect_end(rank.worker, _RANK_LOST)
    rank.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(_PAUSE_S)
    finally:
        with suppress(ProcessLookupError):
            rank.signal(signal.SIGCONT)
    return rank.name


async def kill_loading_rank(stack: ChaosStack, rng: random.Random) -> str:
    """Kill a worker, and then a rank of its successor while this starts and loads its model."""
    worker = rng.choice(stack.local.processes("worker"))
    first = _kill(stack, _Rank(worker, worker.pid))
    num_starts = worker.num_starts
    async with asyncio.timeout(_RESTART_S):
        while worker.num_starts == num_starts:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    later_s = rng.uniform(*_LOADING_S)
    await asyncio.sleep(later_s)
    return f"{first}, {later_s:.1f} s after the restart {_kill(stack, _choose(worker, rng))}"


def _kill(stack: ChaosStack, rank: _Rank) -> str:
    stack.expect_end(rank.worker, rank.end)
    rank.signal(signal.SIGKILL)
    return rank.name


def _choose(worker: ServiceProcess, rng: random.Random) -> _Rank:
    """Any rank of a worker; NotSteadyError if it has ended by itself."""
    if not worker.is_alive:
        raise NotSteadyError(f"{worker.name} has ended")
    return _Rank(worker, rng.choice([worker.pid, *sorted(followers_of(worker.pid))]))


def followers_of(parent: int) -> Iterator[int]:
    """Process ids of the followers that a process has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        # A process that has just ended is none.
        with suppress(OSError):
            _, _, after_name = (folder / "stat").read_text().rpartition(")")
            is_child = int(after_name.split()[1]) == parent
            if is_child and _FOLLOWER in (folder / "cmdline").read_bytes().split(b"\0"):
                yield int(folder.name)
