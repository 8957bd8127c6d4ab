"""Many simulated workers in several shards, led by several schedulers, without instrumentation."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import redis

from benchmarks.cluster_view import ClusterView, read_cluster, read_status, set_num_shards
from benchmarks.scheduler.loaded_stack import LoadedStack
from benchmarks.scheduler.proc import cpu_s, num_sockets, peak_rss_mb
from benchmarks.scheduler.workload import Workload
from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.store.cluster import Timed
from scheduler_svc.store.keys import ClusterKeys

# A worker is a server, its connections and a thread; so many share a process.
_WORKERS_PER_HOST = 16
# Several heartbeats: nothing has changed for so long when the load begins.
_STABLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class FleetSetting:
    """Configuration of a fleet."""

    num_workers: int
    num_shards: int = 1
    num_schedulers: int = 1
    # The load generator's streams to each shard.
    num_gateways: int = 1
    # Fields of SimModel for the simulated workers.
    model: Mapping[str, float] = field(default_factory=dict)
    # Flags of the schedulers.
    scheduler: Mapping[str, object] = field(default_factory=dict)
    workers_per_host: int = _WORKERS_PER_HOST


@dataclass(frozen=True)
class Counters:
    """Totals at one moment. Seconds are processor time, of all processes of a tier."""

    at_s: float
    scheduler_s: float
    redis_s: float
    workers_s: float
    load_s: float
    num_steps: int
    idle_ns: int
    busy_ns: int
    num_tokens: int
    num_ended: int
    # Messages to the gateway, and their bytes.
    num_frames: int
    frame_bytes: int
    # States of all shards in them.
    num_states: int
    state_bytes: int
    # Between schedulers and workers, both directions.
    worker_messages: int
    worker_bytes: int
    # Scripts that were called.
    redis_calls: int
    # Those of scripts included.
    redis_commands: int
    redis_bytes: int

    def __sub__(self, other: "Counters") -> "Counters":
        earlier = asdict(other)
        return Counters(**{key: value - earlier[key] for key, value in asdict(self).items()})


@dataclass(frozen=True)
class Sizes:
    """What exists at one moment."""

    redis_keys: int
    redis_bytes: int
    redis_connections: int
    # Of all schedulers.
    scheduler_sockets: int
    scheduler_rss_mb: float


class Fleet(LoadedStack):
    """Schedulers of a cluster, and their workers."""

    def __init__(self, setting: FleetSetting) -> None:
        super().__init__()
        self.setting = setting

    @property
    def view(self) -> ClusterView:
        """The shards as the first scheduler knows them. grpc.RpcError if it does not respond."""
        return read_cluster(self._addresses[0])

    def run(
        self, workload: Workload, shares: list[int] | None = None, is_placed: bool = False
    ) -> None:
        self.load.call("start", shares=shares, is_placed=is_placed, **asdict(workload))

    def statuses(self) -> list[Any]:
        """The status of each shard, from its leader."""
        shards = self.view.shards
        return [read_status(shard.leader, number) for number, shard in enumerate(shards)]

    def tokens(self) -> list[tuple[int, float]]:
        """The tokens of each stream, and when the last of them arrived: a rate between two such
        times covers whole steps."""
        return [(number, at_s) for number, at_s in self.progress()["tokens_of"]]

    def counters(self) -> Counters:
        """Read all counters. Steps are those of the present terms."""
        workers = [worker for status in self.statuses() for worker in status.workers]
        progress = self.progress()
        server = self.redis.info()
        traffic = [host.call("traffic") for host in self.hosts]
        return Counters(
            at_s=time.monotonic(),
            scheduler_s=self._cpu_s("scheduler"),
            redis_s=server["used_cpu_user"] + server["used_cpu_sys"],
            workers_s=self._cpu_s("workers"),
            load_s=self._cpu_s("load"),
            num_steps=sum(worker.num_steps for worker in workers),
            idle_ns=sum(worker.idle_ns for worker in workers),
            busy_ns=sum(worker.busy_ns for worker in workers),
            num_tokens=progress["tokens"],
            num_ended=progress["ended"],
            num_frames=progress["frames"],
            frame_bytes=progress["frame_bytes"],
            num_states=progress["states"],
            state_bytes=progress["state_bytes"],
            worker_messages=sum(one["sent"] + one["received"] for one in traffic),
            worker_bytes=sum(one["sent_bytes"] + one["received_bytes"] for one in traffic),
            redis_calls=self.redis.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0),
            redis_commands=server["total_commands_processed"],
            redis_bytes=server["total_net_input_bytes"] + server["total_net_output_bytes"],
        )

    def sizes(self) -> Sizes:
        server = self.redis.info()
        schedulers = self.pids["scheduler"]
        return Sizes(
            redis_keys=self.redis.dbsize(),
            redis_bytes=server["used_memory"],
            redis_connections=server["connected_clients"],
            scheduler_sockets=sum(map(num_sockets, schedulers)),
            scheduler_rss_mb=sum(map(peak_rss_mb, schedulers)),
        )

    def _start(self, redis_url: str) -> None:
        directory = self._directory
        setting = self.setting
        sockets = [f"{directory}/worker-{number}.sock" for number in range(setting.num_workers)]
        for index, first in enumerate(range(0, len(sockets), setting.workers_per_host)):
            share = sockets[first : first + setting.workers_per_host]
            self._launch_module(
                "workers", "worker_host", json.dumps(dict(setting.model)), *share, index=index
            )
        self._addresses = [
            f"unix:{directory}/scheduler-{number}.sock" for number in range(setting.num_schedulers)
        ]
        for index, address in enumerate(self._addresses):
            self._launch_scheduler(index, address, redis_url, sockets)
        self._launch_module("load", "load")
        self.hosts = [self._control(f"workers-{i}") for i in range(len(self.pids["workers"]))]
        self.load = self._control("load-0")
        self._wait_for_shards(1)
        if setting.num_shards > 1:
            set_num_shards(self.view.shards[0].leader, setting.num_shards)
            self._wait_for_shards(setting.num_shards)
        leaders = [shard.leader for shard in self.view.shards]
        self.load.call("connect", leaders=leaders, num_gateways=setting.num_gateways)
        self._wait(self.progress, lambda progress: progress["ready"])

    def _wait_for_shards(self, num_shards: int) -> None:
        """Wait until all workers have joined, every scheduler leads that can, and the map of the
        cluster agrees: otherwise shards are still handed over."""
        sizes = (num_shards, self.setting.num_workers, self.setting.num_schedulers)
        changed_at = time.monotonic()

        def find_problem() -> str | None:
            nonlocal changed_at
            problem = self._find_problem(*sizes)
            if problem is not None:
                changed_at = time.monotonic()
            elif time.monotonic() - changed_at < _STABLE_S:
                return "the shards have just been handed over"
            return problem

        self._wait(find_problem, lambda problem: problem is None)

    def _find_problem(self, *sizes: int) -> str | None:
        try:
            view = self.view
            return view.find_problem(*sizes) or view.find_move(read_owners(self.redis))
        except grpc.RpcError as error:
            return str(error)

    def _launch_scheduler(
        self, index: int, address: str, redis_url: str, sockets: list[str]
    ) -> None:
        flags = {
            "listen": address,
            "redis-url": redis_url,
            "workers": ",".join(f"unix:{socket}" for socket in sockets),
            "log-level": "warning",
            **self.setting.scheduler,
        }
        command = [sys.executable, "-m", "scheduler_svc"]
        self._launch("scheduler", index, [*command, *(f"--{k}={v}" for k, v in flags.items())])

    def _cpu_s(self, name: str) -> float:
        return sum(map(cpu_s, self.pids[name]))


def read_owners(client: redis.Redis) -> list[str]:
    """By shard, the address of the scheduler that should lead it by the map in Redis; empty for one
    without. Without a map there are no shards."""
    keys = ClusterKeys()
    # By its types the client could decode responses.
    packed: Any = client.get(keys.map)
    if packed is None:
        return []
    cluster = ClusterMap.parse(packed)
    schedulers: Any = client.hgetall(keys.schedulers)
    addresses = {
        name.decode(): Timed.parse(timed).value.decode() for name, timed in schedulers.items()
    }
    return [addresses.get(cluster.owners.get(shard, ""), "") for shard in range(cluster.num_shards)]
