"""Several real Redis servers on loopback ports: a cluster, and a primary with Sentinels."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from benchmarks.redis_cluster import free_port, join, replicates, text, wait_until
from quire.launcher.child import start_with_death_signal
from quire.launcher.redis import find_redis_server

# Of a cluster's node that does not respond, and of a primary for its Sentinels.
_DOWN_AFTER_MS = 500


class Server:
    """A `redis-server` with a port of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        self._client = redis.Redis(port=self.port)
        folder = directory / str(self.port)
        folder.mkdir()
        config = folder / "redis.conf"
        lines = [f"port {self.port}", "bind 127.0.0.1", 'save ""', f"dir {folder}"]
        config.write_text("\n".join([*lines, *options]) + "\n")
        mode = ["--sentinel"] if any(one.startswith("sentinel ") for one in options) else []
        command = [str(find_redis_server()), str(config), *mode]
        self._process: subprocess.Popen[bytes] = start_with_death_signal(command, folder / "log")
        wait_until(self._responds, "a server")

    def do(self, *command: str | bytes | int) -> object:
        return self._client.execute_command(*command)

    def info(self, section: str) -> dict[str, object]:
        return self._client.info(section)

    def suspend(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

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
        options = (
            "cluster-enabled yes",
            f"cluster-node-timeout {_DOWN_AFTER_MS}",
            # The others go on while slots have no node.
            "cluster-require-full-coverage no",
        )
        self.servers = [Server(directory, *options) for _ in range(4)]
        *primaries, self.replica = self.servers
        slots = join(self.servers, primaries)
        self.slot = int(str(self.replica.do("CLUSTER", "KEYSLOT", key)))
        self.owner = next(
            server for server, part in zip(primaries, slots, strict=True) if self.slot in part
        )
        for server in self.servers:
            wait_until(lambda server=server: self._is_whole(server), "a cluster")
        wait_until(lambda: replicates(self.replica, self.owner), "a replica")
        wait_until(lambda: self._is_replicated(), "a replica")

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{hosts}"

    def id_of(self, server: Server) -> str:
        return text(server.do("CLUSTER", "MYID"))

    def begin_move(self, target: Server) -> None:
        """The owner gives the keys' slot to a primary, and still has the keys."""
        target.do("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.id_of(self.owner))
        self.owner.do("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.id_of(target))

    def move_key(self, key: str | bytes, target: Server) -> None:
        self.owner.do("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)

    def move_slot(self, target: Server) -> None:
        """Move the keys' slot to a primary, as `redis-cli --cluster reshard` does."""
        self.begin_move(target)
        self.end_move(target)

    def end_move(self, target: Server) -> None:
        owner = self.owner
        found = owner.do("CLUSTER", "GETKEYSINSLOT", self.slot, 1000)
        assert isinstance(found, list)
        for key in found:
            self.move_key(key, target)
        primaries = [one for one in self.servers if one not in (target, owner, self.replica)]
        for server in (target, owner, *primaries):
            server.do("CLUSTER", "SETSLOT", self.slot, "NODE", self.id_of(target))
        self.owner = target
        # A replica that does not know it would be promoted without the slot.
        for server in self.servers:
            wait_until(lambda server=server: self._owner_by(server) == target.port, "the new owner")

    def _owner_by(self, server: Server) -> int:
        """The port of the slot's owner, as a server knows it."""
        ranges: Any = server.do("CLUSTER", "SLOTS")
        found = (int(owner[1]) for start, end, owner, *_ in ranges if start <= self.slot <= end)
        return next(found, 0)

    def _is_whole(self, server: Server) -> bool:
        return "cluster_state:ok" in text(server.do("CLUSTER", "INFO"))

    def _is_replicated(self) -> bool:
        replication = self.replica.info("replication")
        return replication["role"] == "slave" and replication["master_link_status"] == "up"


class Sentinels:
    """A primary with a replica, and three Sentinels, two of which have to agree."""

    def __init__(self, directory: Path) -> None:
        self.primary = Server(directory)
        self.replica = Server(directory, f"replicaof 127.0.0.1 {self.primary.port}")
        wait_until(
            lambda: self.replica.info("replication")["master_link_status"] == "up", "a replica"
        )
        options = (
            f"sentinel monitor quire 127.0.0.1 {self.primary.port} 2",
            f"sentinel down-after-milliseconds quire {_DOWN_AFTER_MS}",
            "sentinel failover-timeout quire 2000",
        )
        self.sentinels = [Server(directory, *options) for _ in range(3)]
        for sentinel in self.sentinels:
            wait_until(lambda one=sentinel: self._knows_all(one), "Sentinels that know each other")

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
