"""Commands to a child process over a unix socket: one line of JSON each way.

The child responds on a thread that sleeps between commands, so that its event loop is not disturbed
during a measurement.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Handler = Callable[..., object]

_POLL_S = 0.02
# From the close of a child's sockets to the end of its process.
_GONE_S = 0.5


def serve(path: Path, handlers: Mapping[str, Handler]) -> None:
    """Start a thread that serves one client after the other until the process ends."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    threading.Thread(target=_accept, args=(server, handlers), name="control", daemon=True).start()


def _accept(server: socket.socket, handlers: Mapping[str, Handler]) -> None:
    while True:
        client, _ = server.accept()
        with client, client.makefile("rw") as stream:
            for line in stream:
                arguments = json.loads(line)
                result = handlers[arguments.pop("command")](**arguments)
                stream.write(json.dumps(result) + "\n")
                stream.flush()


class Control:
    """The client."""

    def __init__(self, path: Path, timeout_s: float, check: Callable[[], None]) -> None:
        """Connect to the child, with retries; `check` raises an error if it has ended."""
        self._check = check
        deadline_s = time.monotonic() + timeout_s
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._socket.connect(str(path))
                break
            except OSError:
                check()
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_POLL_S)
        self._stream = self._socket.makefile("rw")

    def call(self, command: str, **arguments: object) -> Any:
        """Execute a command and return its result. The error of `check` if the child has ended;
        ConnectionError if it closed the connection."""
        try:
            self._stream.write(json.dumps({"command": command, **arguments}) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except ConnectionError:
            line = ""
        if not line:
            time.sleep(_GONE_S)
            self._check()
            raise ConnectionError(f"no response to {command!r}")
        return json.loads(line)

    def close(self) -> None:
        # Of a child that has ended, a command may be left to write.
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()
