"""The processes under test, and whoever starts them again."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire.errors import QuireError
from quire.internal.v1.operations_pb2 import GetStatusResponse
from quire.launcher.child import ChildProcess
from quire.launcher.errors import LaunchError
from quire.launcher.processes import ServiceProcess
from quire.launcher.stack import LocalStack
from quire.operations import Operations
from quire.probe import is_serving

_ASK_TIMEOUT_S = 2.0
NUM_WORKERS = 3
# Requests that nobody is attached to are cancelled so soon that there is time to see it.
ORPHAN_GRACE_S = 10.0
_COMMON = {
    # Two workers have room for all streams when the third is away.
    "QUIRE_WORKER_MAX_NUM_SEQS": "64",
    "QUIRE_WORKER_MAX_MODEL_LEN": "1024",
    "QUIRE_WORKER_NUM_BLOCKS": "2049",
    "QUIRE_SCHEDULER_ORPHAN_GRACE_S": str(ORPHAN_GRACE_S),
}
SETTINGS = {
    # Slow enough that two cores carry all the processes and the clients.
    "sim": {
        **_COMMON,
        "QUIRE_WORKER_ENGINE": "sim",
        "QUIRE_WORKER_SIM_STEP_MS": "30",
    },
    "demo": {
        **_COMMON,
        "QUIRE_WORKER_DTYPE": "float32",
        "QUIRE_WORKER_DEVICE": "cpu",
        "QUIRE_WORKER_THREADS": "1",
    },
}
# A token that is sampled again is so in a batch of others, which rounds otherwise; simulated ones
# are drawn from the seed.
LOGPROB_TOLERANCES = {"sim": 0.0, "demo": 1e-3}


class Unsteady(Exception):
    """The stack did not recover, or not in time. The message says what is missing."""


class ChaosStack:
    """Two schedulers, three workers, two gateways and a Redis that keeps a file; each is started
    again when it ends."""

    def __init__(self, model: str, settings: Mapping[str, str]) -> None:
        # Ends that nobody brought about, as the processes told them.
        self.unexpected_ends: list[str] = []
        self._expected: list[str] = []
        self.local = LocalStack(
            model,
            num_workers=NUM_WORKERS,
            num_schedulers=2,
            num_gateways=2,
            redis_appendonly=True,
            restart=True,
            settings=settings,
            on_end=self._note_end,
        )

    def expect_end(self, child: ChildProcess) -> None:
        """It is about to be killed."""
        self._expected.append(child.name)

    def unsettled(self) -> str | None:
        """What has not recovered yet; None when all of it has."""
        for role in ("gateway", "worker"):
            for process in self.local.processes(role):
                if not process.is_alive or not process.is_ready():
                    return f"{process.name} is not ready"
        for scheduler in self.local.processes("scheduler"):
            if not scheduler.is_alive or not _lives(scheduler):
                return f"{scheduler.name} does not answer"
        if not self.local.redis.is_alive:
            return "redis is away"
        return self._unsettled_leader()

    def status(self) -> GetStatusResponse | None:
        """What the leader says; None while nobody leads."""
        leader = self.local.leader()
        if leader is None or leader.address is None:
            return None
        try:
            with Operations(leader.address) as operations:
                return operations.status(False, _ASK_TIMEOUT_S)
        except QuireError:
            return None

    async def leader(self) -> ServiceProcess:
        """Unsteady if nobody leads now."""
        leader = await asyncio.to_thread(self.local.leader)
        if leader is None:
            raise Unsteady("nobody leads")
        return leader

    def save_logs(self, directory: Path) -> None:
        """Copies what the processes wrote to where it outlives the stack."""
        for log in self._logs():
            shutil.copy(log, directory)

    def complaints(self) -> list[str]:
        """What the logs must not say whatever breaks: a program's own errors, and plans that broke
        a rule of paged attention."""
        found = Counter(f"{log.name}: {said}" for log in self._logs() for said in complaints(log))
        return [f"{said} ({count} times)" for said, count in found.items()]

    def _unsettled_leader(self) -> str | None:
        status = self.status()
        if status is None:
            return "nobody leads"
        if len(status.workers) != NUM_WORKERS:
            return f"the leader has {len(status.workers)} of {NUM_WORKERS} workers"
        return None

    def _note_end(self, error: LaunchError) -> None:
        """In the supervisor's thread."""
        name = str(error).split()[0]
        if name in self._expected and "by SIGKILL" in str(error):
            self._expected.remove(name)
        else:
            self.unexpected_ends.append(str(error))

    def _logs(self) -> list[Path]:
        [one, *_] = self.local.processes("scheduler")
        return sorted(one.spec.address_file.parent.glob("*.log"))


def complaints(log: Path) -> Iterator[str]:
    """The errors of tracebacks, and lines about broken rules."""
    lines = iter(log.read_text(errors="replace").splitlines())
    for line in lines:
        if "Traceback (most recent call last)" in line:
            yield next((end for end in lines if not end.startswith(" ")), line)
        elif "(rule: " in line:
            yield line


def _lives(process: ServiceProcess) -> bool:
    """A scheduler that stands by is alive and not ready."""
    try:
        return process.address is not None and is_serving(process.address, "", _ASK_TIMEOUT_S)
    except QuireError:
        return False
