"""Several real Redis servers on loopback ports: a cluster, and a primary with Sentinels."""

import contextlib
import itertools
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

from quire.launcher.child import start_with_death_signal
from quire.launcher.redis import find_redis_server

_WITHIN_S = 30.0
# Of a cluster's node that does not respond, and of a primary for its Sentinels.
_DOWN_AFTER_MS = 500
# Nodes of a cluster use the port above theirs by this much, too.
_BUS_OFFSET = 10_000


class Server:
    """A `redis-server` with a port of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = _free_port()
        self._client = redis.Redis(port=self.port)
        folder = directory / str(self.port)
        folder.mkdir()
        config = folder / "redis.conf"
        lines = [f"port {self.port}", "bind 127.0.0.1", 'save ""', f"dir {folder}"]
        config.write_text("\n".join([*lines, *options]) + "\n")
        mode = ["--sentinel"] if any(one.startswith("sentinel ") for one in options) else []
        command = [str(find_redis_server()), str(config), *mode]
        self._process: subprocess.Popen[bytes] = start_with_death_signal(command, folder / "log")
        wait_for(self._responds, "a server")

    def do(self, *command: str | int) -> object:
        return self._client.execute_command(*command)

    def info(self, section: str) -> dict[str, object]:
        return self._client.info(section)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._client.close()

    def _responds(self) -> bool:
        with contextlib.suppress(redis.ConnectionError):
            return bool(self._client.ping())
        return False


class Cluster:
    """Three primaries with a third of the slots each; the one with the keys has a replica."""

    def __init__(self, directory: Path, key: str) -> None:
        options = ("cluster-enabled yes", f"cluster-node-timeout {_DOWN_AFTER_MS}")
        self.servers = [Server(directory, *options) for _ in range(4)]
        first, *others = self.servers
        for server in others:
            first.do("CLUSTER", "MEET", "127.0.0.1", server.port)
        bounds = [0, 5461, 10922, 16384]
        self.slot = int(str(first.do("CLUSTER", "KEYSLOT", key)))
        for server, (start, end) in zip(self.servers, itertools.pairwise(bounds), strict=False):
            server.do("CLUSTER", "ADDSLOTS", *range(start, end))
            if start <= self.slot < end:
                self.owner = server
        self.replica = self.servers[-1]
        for server in self.servers:
            wait_for(lambda server=server: self._is_whole(server), "a cluster")
        self.replica.do("CLUSTER", "REPLICATE", self.id_of(self.owner))
        wait_for(lambda: self._is_replicated(), "a replica")

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{hosts}"

    def id_of(self, server: Server) -> str:
        return _text(server.do("CLUSTER", "MYID"))

    def move_slot(self, target: Server) -> None:
        """Move the keys' slot to a primary, as `redis-cli --cluster reshard` does."""
        owner = self.owner
        target.do("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.id_of(owner))
        owner.do("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.id_of(target))
        found = owner.do("CLUSTER", "GETKEYSINSLOT", self.slot, 1000)
        assert isinstance(found, list)
        for key in found:
            owner.do("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        for server in (target, owner):
            server.do("CLUSTER", "SETSLOT", self.slot, "NODE", self.id_of(target))
        self.owner = target

    def _is_whole(self, server: Server) -> bool:
        info = _text(server.do("CLUSTER", "INFO"))
        return "cluster_state:ok" in info and "cluster_known_nodes:4" in info

    def _is_replicated(self) -> bool:
        replication = self.replica.info("replication")
        return replication["role"] == "slave" and replication["master_link_status"] == "up"


class Sentinels:
    """A primary with a replica, and three Sentinels, two of which have to agree."""

    def __init__(self, directory: Path) -> None:
        self.primary = Server(directory)
        self.replica = Server(directory, f"replicaof 127.0.0.1 {self.primary.port}")
        wait_for(
            lambda: self.replica.info("replication")["master_link_status"] == "up", "a replica"
        )
        options = (
            f"sentinel monitor quire 127.0.0.1 {self.primary.port} 2",
            f"sentinel down-after-milliseconds quire {_DOWN_AFTER_MS}",
            "sentinel failover-timeout quire 2000",
        )
        self.sentinels = [Server(directory, *options) for _ in range(3)]
        for sentinel in self.sentinels:
            wait_for(lambda one=sentinel: self._knows_all(one), "Sentinels that know each other")

    @property
    def servers(self) -> list[Server]:
        return [self.primary, self.replica, *self.sentinels]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.sentinels)
        return f"redis+sentinel://{hosts}/quire"

    def _knows_all(self, sentinel: Server) -> bool:
        state = sentinel.info("sentinel")["master0"]
        assert isinstance(state, dict)
        return (state["status"], state["slaves"], state["sentinels"]) == ("ok", 1, 3)


@contextlib.contextmanager
def running(group: Cluster | Sentinels) -> Iterator[None]:
    try:
        yield
    finally:
        for server in group.servers:
            server.kill()


def wait_for(predicate: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not predicate():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        time.sleep(0.02)


def _free_port() -> int:
    """A free port whose cluster bus's port is free, too."""
    while True:
        with socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port + _BUS_OFFSET < 2**16:
                with contextlib.suppress(OSError):
                    bus.bind(("127.0.0.1", port + _BUS_OFFSET))
                    return port


def _text(reply: object) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)
