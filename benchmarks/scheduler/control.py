"""Questions to a child process, over a unix socket: one line of JSON each way.

The child answers on a thread that sleeps between questions, so that its own loop stays undisturbed
while something is measured.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Handler = Callable[..., object]

_POLL_S = 0.02
# From the end of a child's sockets to its own.
_GONE_S = 0.5


def serve(path: Path, handlers: Mapping[str, Handler]) -> None:
    """Answers from here on, one client after the other, until the process ends."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    threading.Thread(target=_accept, args=(server, handlers), name="control", daemon=True).start()


def _accept(server: socket.socket, handlers: Mapping[str, Handler]) -> None:
    while True:
        client, _ = server.accept()
        with client, client.makefile("rw") as stream:
            for line in stream:
                question = json.loads(line)
                answer = handlers[question.pop("command")](**question)
                stream.write(json.dumps(answer) + "\n")
                stream.flush()


class Control:
    """The asking end."""

    def __init__(self, path: Path, timeout_s: float, check: Callable[[], None]) -> None:
        """Waits for the child; `check` raises if it has ended."""
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

    def ask(self, command: str, **arguments: object) -> Any:
        """What `check` raises if the child has gone; ConnectionError if it cannot answer."""
        self._stream.write(json.dumps({"command": command, **arguments}) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            time.sleep(_GONE_S)
            self._check()
            raise ConnectionError(f"no answer to {command!r}")
        return json.loads(line)

    def close(self) -> None:
        self._stream.close()
        self._socket.close()
