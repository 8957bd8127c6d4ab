"""The processes under test, restarted by a supervisor."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.chaos.redis_servers import ClusterServers, RedisServers, SingleRedis
from benchmarks.cluster_view import ClusterView, read_cluster, read_status, set_num_shards
from quire.client.errors import QuireError
from quire.client.health_probe import is_serving
from quire.internal.v1.operations_pb2 import GetStatusResponse
from quire.launcher.child import ChildProcess
from quire.launcher.errors import LaunchError
from quire.launcher.processes import ServiceProcess
from quire.launcher.stack import LocalStack

_RPC_TIMEOUT_S = 2.0
_LEADER_WITHIN_S = 3.0
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


@dataclass(frozen=True)
class Sizes:
    """Numbers of processes and shards."""

    num_gateways: int = 2
    num_schedulers: int = 2
    num_workers: int = 3
    num_shards: int = 1


class ChaosStack:
    """Gateways, schedulers, workers and Redis: a server with an append-only file, or a cluster of
    such servers. Each process is restarted when it ends."""

    def __init__(
        self,
        model: str,
        settings: Mapping[str, str],
        sizes: Sizes | None = None,
        *,
        has_redis_cluster: bool = False,
    ) -> None:
        # Messages of processes that ended without a fault.
        self.unexpected_ends: list[str] = []
        # By process, with how it ends.
        self._expected: list[tuple[str, str]] = []
        self._sizes = sizes or Sizes()
        # Rises while the stack runs.
        self.num_shards = 1
        self.cluster = ClusterServers() if has_redis_cluster else None
        self.local = LocalStack(
            model,
            num_workers=self._sizes.num_workers,
            num_schedulers=self._sizes.num_schedulers,
            num_gateways=self._sizes.num_gateways,
            http_listen="127.0.0.1:0",
            redis_url=None if self.cluster is None else self.cluster.url,
            redis_appendonly=True,
            restart=True,
            settings=settings,
            on_end=self._note_end,
        )

    def start(self) -> None:
        """LaunchError or NotSteadyError if a part does not start."""
        try:
            if self.cluster is not None:
                self.cluster.start(self._note_end)
            self.local.start()
            if self._sizes.num_shards > 1:
                self.raise_shards(self._sizes.num_shards)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill everything: a graceful stop would wait for stuck requests."""
        self.local.kill()
        self.local.stop()
        if self.cluster is not None:
            self.cluster.close()

    @property
    def redis(self) -> RedisServers:
        return SingleRedis(self.local.redis) if self.cluster is None else self.cluster

    def raise_shards(self, num_shards: int) -> None:
        """Raise the number of shards. NotSteadyError if no scheduler does it."""
        until = time.monotonic() + _LEADER_WITHIN_S
        while (error := self._try_raise_shards(num_shards)) is not None:
            if time.monotonic() > until:
                raise NotSteadyError(f"the number of shards stays as it is: {error}")
            time.sleep(0.1)
        self.num_shards = num_shards

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
        problem = self.redis.find_problem()
        if problem is not None:
            return problem
        view = self.find_view()
        if view is None:
            return "there is no leader"
        sizes = self._sizes
        return view.find_problem(self.num_shards, sizes.num_workers, sizes.num_schedulers)

    def statuses(self) -> list[GetStatusResponse]:
        """The status of each shard that has a leader which responds."""
        view = self.find_view()
        found = []
        for number, shard in enumerate(view.shards if view else ()):
            if shard.leader:
                try:
                    found.append(read_status(shard.leader, number))
                except grpc.RpcError:
                    continue
        return found

    def find_view(self) -> ClusterView | None:
        """The shards as the first scheduler that responds has them; None if none does."""
        for scheduler in self.local.processes("scheduler"):
            if scheduler.is_alive and scheduler.address is not None:
                try:
                    return read_cluster(scheduler.address)
                except grpc.RpcError:
                    continue
        return None

    async def view(self) -> ClusterView:
        """The shards, each with a leader. NotSteadyError if one has none for `_LEADER_WITHIN_S`:
        on a loaded machine a single call to Redis may be late, and a leader is away for a moment.
        """
        until = time.monotonic() + _LEADER_WITHIN_S
        while True:
            view = await asyncio.to_thread(self.find_view)
            if view is not None and view.shards and all(shard.leader for shard in view.shards):
                return view
            if time.monotonic() > until:
                raise NotSteadyError("there is no leader")
            await asyncio.sleep(0.1)

    async def leaders(self) -> Sequence[ServiceProcess]:
        """The schedulers that lead a shard. NotSteadyError as `view`."""
        addresses = (await self.view()).leaders
        return [one for one in self.local.processes("scheduler") if one.address in addresses]

    def save_logs(self, directory: Path) -> None:
        """Copy the logs of the processes, which are deleted with the stack."""
        for log in self._logs():
            shutil.copy(log, directory)

    def complaints(self) -> list[str]:
        """Return log lines that no fault excuses: tracebacks, and plans that broke a rule of paged
        attention."""
        found = Counter(f"{log.name}: {line}" for log in self._logs() for line in complaints(log))
        return [f"{line} ({count} times)" for line, count in found.items()]

    def _try_raise_shards(self, num_shards: int) -> str | None:
        """Return why it was not done."""
        view = self.find_view()
        leader = view.shards[0].leader if view and view.shards else ""
        if not leader:
            return "there is no leader"
        try:
            set_num_shards(leader, num_shards)
        except grpc.RpcError as error:
            return str(error)
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
        of_cluster = [] if self.cluster is None else self.cluster.logs
        return [*sorted(one.spec.address_file.parent.glob("*.log")), *of_cluster]


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
