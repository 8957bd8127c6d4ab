"""The processes under test, restarted by a supervisor."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire.client.errors import QuireError
from quire.client.health_probe import is_serving
from quire.client.operations import Operations
from quire.internal.v1.operations_pb2 import GetStatusResponse
from quire.launcher.child import ChildProcess
from quire.launcher.errors import LaunchError
from quire.launcher.processes import ServiceProcess
from quire.launcher.stack import LocalStack

_RPC_TIMEOUT_S = 2.0
_LEADER_WITHIN_S = 3.0
NUM_WORKERS = 3
# Short, so that the cancellation of orphaned requests is observed.
ORPHAN_GRACE_S = 10.0
_COMMON = {
    # Two workers have room for all streams when the third is down.
    "QUIRE_WORKER_MAX_NUM_SEQS": "64",
    "QUIRE_WORKER_MAX_MODEL_LEN": "1024",
    "QUIRE_WORKER_NUM_BLOCKS": "2049",
    "QUIRE_SCHEDULER_ORPHAN_GRACE_S": str(ORPHAN_GRACE_S),
}
SETTINGS = {
    # Slow enough for two cores to run all processes and the clients.
    "sim": {
        **_COMMON,
        "QUIRE_WORKER_ENGINE": "sim",
        "QUIRE_WORKER_SIM_STEP_MS": "30",
        "QUIRE_WORKER_SIM_LONGEST_JUMP": "5",
    },
    "demo": {
        **_COMMON,
        "QUIRE_WORKER_DTYPE": "float32",
        "QUIRE_WORKER_DEVICE": "cpu",
        "QUIRE_WORKER_THREADS": "1",
    },
}
# A recomputed token is computed in another batch, which rounds differently; simulated ones are
# drawn from the seed.
LOGPROB_TOLERANCES = {"sim": 0.0, "demo": 1e-3}


class NotSteadyError(Exception):
    """The stack did not recover in time. The message says what is missing."""


class ChaosStack:
    """Two schedulers, three workers, two gateways and a Redis with an append-only file. Each
    process is restarted when it ends."""

    def __init__(self, model: str, settings: Mapping[str, str]) -> None:
        # Messages of processes that ended without a fault.
        self.unexpected_ends: list[str] = []
        # By process, with how it ends.
        self._expected: list[tuple[str, str]] = []
        self.local = LocalStack(
            model,
            num_workers=NUM_WORKERS,
            num_schedulers=2,
            num_gateways=2,
            http_listen="127.0.0.1:0",
            redis_appendonly=True,
            restart=True,
            settings=settings,
            on_end=self._note_end,
        )

    def expect_end(self, child: ChildProcess, how: str = "by SIGKILL") -> None:
        """Do not count the next such end of this process as unexpected."""
        self._expected.append((child.name, how))

    def find_problem(self) -> str | None:
        """Return what has not recovered yet; None if everything has."""
        for role in ("gateway", "worker"):
            for process in self.local.processes(role):
                if not process.is_alive or not process.is_ready():
                    return f"{process.name} is not ready"
        for scheduler in self.local.processes("scheduler"):
            if not scheduler.is_alive or not _is_alive(scheduler):
                return f"{scheduler.name} does not respond"
        if not self.local.redis.is_alive:
            return "redis is down"
        return self._leader_problem()

    def status(self) -> GetStatusResponse | None:
        """Return the leader's status; None while there is no leader."""
        leader = self.local.leader()
        if leader is None or leader.address is None:
            return None
        try:
            with Operations(leader.address) as operations:
                return operations.status(False, _RPC_TIMEOUT_S)
        except QuireError:
            return None

    async def leader(self) -> ServiceProcess:
        """Return the leader. NotSteadyError if there is none for `_LEADER_WITHIN_S`: on a loaded
        machine a single call to Redis may be late, and the leader is not ready for a moment."""
        until = time.monotonic() + _LEADER_WITHIN_S
        while (leader := await asyncio.to_thread(self.local.leader)) is None:
            if time.monotonic() > until:
                raise NotSteadyError("there is no leader")
            await asyncio.sleep(0.1)
        return leader

    def save_logs(self, directory: Path) -> None:
        """Copy the logs of the processes, which are deleted with the stack."""
        for log in self._logs():
            shutil.copy(log, directory)

    def complaints(self) -> list[str]:
        """Return log lines that no fault excuses: tracebacks, and plans that broke a rule of paged
        attention."""
        found = Counter(f"{log.name}: {line}" for log in self._logs() for line in complaints(log))
        return [f"{line} ({count} times)" for line, count in found.items()]

    def _leader_problem(self) -> str | None:
        status = self.status()
        if status is None:
            return "there is no leader"
        if len(status.workers) != NUM_WORKERS:
            return f"the leader has {len(status.workers)} of {NUM_WORKERS} workers"
        return None

    def _note_end(self, error: LaunchError) -> None:
        """Called in the supervisor's thread."""
        message = str(error)
        for name, how in self._expected:
            if message.startswith(f"{name} ended {how}"):
                self._expected.remove((name, how))
                return
        self.unexpected_ends.append(message)

    def _logs(self) -> list[Path]:
        [one, *_] = self.local.processes("scheduler")
        return sorted(one.spec.address_file.parent.glob("*.log"))


def complaints(log: Path) -> Iterator[str]:
    """Yield the errors of tracebacks, and lines about broken rules."""
    lines = iter(log.read_text(errors="replace").splitlines())
    for line in lines:
        if "Traceback (most recent call last)" in line:
            yield next((end for end in lines if not end.startswith(" ")), line)
        elif "(rule: " in line:
            yield line


def _is_alive(process: ServiceProcess) -> bool:
    """Return whether a scheduler responds; a standby is alive and not ready."""
    try:
        return process.address is not None and is_serving(process.address, "", _RPC_TIMEOUT_S)
    except QuireError:
        return False
