"""A Redis Cluster of three primaries with a replica each, as child processes on loopback ports."""

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import redis
from redis.cluster import ClusterNode

from quire.launcher.child import (
    ChildProcess,
    Process,
    Spawn,
    in_this_thread,
    start_with_death_signal,
)
from quire.launcher.redis import find_redis_server

_WITHIN_S = 30.0
_POLL_S = 0.02
_RPC_TIMEOUT_S = 1.0
_NUM_PRIMARIES = 3
_NUM_SLOTS = 16384
# A node that does not respond for this time is replaced by its replica.
NODE_TIMEOUT_MS = 1000
# Nodes use the port above theirs by this much, too.
_BUS_OFFSET = 10_000


class RedisNode(ChildProcess):
    """A node, which keeps its port, its place in the cluster and its data over restarts."""

    def __init__(self, name: str, directory: Path, spawn: Spawn = in_this_thread) -> None:
        super().__init__(name, spawn)
        self.port = free_port()
        self._directory = directory / name
        self._client = redis.Redis(port=self.port, socket_timeout=_RPC_TIMEOUT_S)

    def do(self, *command: str | int) -> Any:
        """Run a command and return its reply; redis.RedisError if it fails."""
        return self._client.execute_command(*command)  # type: ignore[no-untyped-call]

    def info(self, section: str) -> dict[str, Any]:
        return self._client.info(section)

    def find_problem(self) -> str | None:
        """Return what is missing from its point of view."""
        try:
            state = text(self.do("CLUSTER", "INFO"))
            replication = self.info("replication")
        except redis.RedisError as error:
            return f"{self.name}: {error}"
        if "cluster_state:ok" not in state:
            return f"{self.name}: the cluster's state is not ok"
        if replication["role"] == "master":
            return None if replication["connected_slaves"] else f"{self.name} has no replica"
        is_linked = replication["master_link_status"] == "up"
        return None if is_linked else f"{self.name} has no link to its primary"

    def close(self) -> None:
        """Kill the node for good."""
        self.autorestart = False
        if self.num_starts:
            self.kill()
            self.wait(_WITHIN_S)
        self._client.close()

    @property
    def log_file(self) -> Path:
        return self._directory.parent / f"{self.name}.log"

    @property
    def _log_file(self) -> Path:
        return self.log_file

    def _start(self) -> Process:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "yes",
            "dir": str(self._directory),
            "logfile": str(self.log_file),
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            # The others go on while a primary's slots have none.
            "cluster-require-full-coverage": "no",
            # Replicas with old data stand for election, too: their age is unknown after a start.
            "cluster-replica-validity-factor": "0",
        }
        flags = [word for key, value in options.items() for word in (f"--{key}", value)]
        return start_with_death_signal([str(find_redis_server()), *flags], self.log_file)


class RedisCluster:
    """Started by `start`, ended by `close`. Nodes log to `directory`/NAME.log."""

    def __init__(self, directory: Path, spawn: Spawn = in_this_thread) -> None:
        self.nodes = [
            RedisNode(f"redis-{number}", directory, spawn) for number in range(2 * _NUM_PRIMARIES)
        ]

    def start(self) -> None:
        """Start the nodes and wait until each primary has its replica. TimeoutError."""
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            wait_until(lambda node=node: _responds(node), f"{node.name} to respond")  # type: ignore[misc]
        primaries, replicas = self.nodes[:_NUM_PRIMARIES], self.nodes[_NUM_PRIMARIES:]
        join(self.nodes, primaries)
        for primary, replica in zip(primaries, replicas, strict=True):
            wait_until(
                lambda one=replica, of=primary: replicates(one, of),  # type: ignore[misc]
                f"{replica.name} to replicate",
            )
        wait_until(lambda: self.find_problem() is None, "a cluster with replicas")

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def client(self) -> redis.RedisCluster:
        """A client of all nodes. redis.RedisError if none responds."""
        nodes = [
            ClusterNode("127.0.0.1", node.port)  # type: ignore[no-untyped-call]
            for node in self.nodes
        ]
        return redis.RedisCluster(startup_nodes=nodes, socket_timeout=_RPC_TIMEOUT_S)

    def primary_of(self, key: str) -> RedisNode | None:
        """Return the node with a key's slot as the first node that responds knows it; None if none
        responds, or none that responds knows it."""
        for node in self.nodes:
            with contextlib.suppress(redis.RedisError):
                slot = int(node.do("CLUSTER", "KEYSLOT", key))
                if "cluster_state:ok" in text(node.do("CLUSTER", "INFO")):
                    return self._owner(node.do("CLUSTER", "SLOTS"), slot)
        return None

    def find_problem(self) -> str | None:
        """Return what is missing; None if all nodes run and each primary has a replica."""
        return next((problem for node in self.nodes if (problem := node.find_problem())), None)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _owner(self, ranges: Any, slot: int) -> RedisNode | None:
        ports = {node.port: node for node in self.nodes}
        for start, end, primary, *_ in ranges:
            if int(start) <= slot <= int(end):
                return ports.get(int(primary[1]))
        return None


class Node(Protocol):
    """A server of a cluster."""

    port: int

    def do(self, *command: str | int) -> Any:
        """Run a command and return its reply; redis.RedisError if it fails."""


def join(nodes: Sequence[Node], primaries: Sequence[Node]) -> list[range]:
    """Make a cluster of servers that run, and wait until they know each other. The primaries get
    equally many slots, which are returned in their order."""
    first, *others = nodes
    for node in others:
        first.do("CLUSTER", "MEET", "127.0.0.1", node.port)
    bounds = [_NUM_SLOTS * part // len(primaries) for part in range(len(primaries) + 1)]
    slots = [range(start, end) for start, end in itertools.pairwise(bounds)]
    for node, part in zip(primaries, slots, strict=True):
        node.do("CLUSTER", "ADDSLOTS", *part)
    known = f"cluster_known_nodes:{len(nodes)}"
    for node in nodes:
        wait_until(
            lambda node=node: known in text(node.do("CLUSTER", "INFO")),  # type: ignore[misc]
            f"port {node.port} to know the others",
        )
    return slots


def replicates(replica: Node, primary: Node) -> bool:
    """Make it a replica; a node learns of others by gossip, so the first attempts may fail."""
    try:
        return bool(replica.do("CLUSTER", "REPLICATE", text(primary.do("CLUSTER", "MYID"))))
    except redis.ResponseError:
        return False


def wait_until(predicate: Callable[[], bool], what: str) -> None:
    """Wait until the predicate holds; TimeoutError if it does not within half a minute."""
    deadline = time.monotonic() + _WITHIN_S
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out waiting for {what}")
        time.sleep(_POLL_S)


def _responds(node: RedisNode) -> bool:
    node.check()
    try:
        return bool(node.do("PING"))
    except redis.RedisError:
        return False


def free_port() -> int:
    """A free port whose cluster bus's port is free, too."""
    while True:
        with socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port + _BUS_OFFSET < 2**16:
                with contextlib.suppress(OSError):
                    bus.bind(("127.0.0.1", port + _BUS_OFFSET))
                    return port


def text(reply: Any) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)
