"""Restarts processes that have ended, as a container engine does with `restart: unless-stopped`."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.launcher.child import ChildProcess
from quire.launcher.errors import LaunchError

_POLL_S = 0.05
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
# The backoff is reset after a process has run for this time.
_STABLE_S = 5.0


@dataclass
class _Watched:
    """A child and the time of its restart."""

    child: ChildProcess
    backoff_s: float = _FIRST_BACKOFF_S
    # By the monotonic clock; None while the child is alive.
    due_s: float | None = None


class Supervisor:
    """Restarts children that end, until `close`, with exponential backoff.

    Calls `on_end` in its own thread with the cause of each end; its exceptions are ignored.
    """

    def __init__(
        self, children: Sequence[ChildProcess], on_end: Callable[[LaunchError], object]
    ) -> None:
        self._watched = [_Watched(child) for child in children]
        self._on_end = on_end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="quire-supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the supervisor; it starts nothing after this returns."""
        self._closed.set()
        # A finalizer may run in any thread, and none can wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while not self._closed.wait(_POLL_S):
            for watched in self._watched:
                self._check(watched)

    def _check(self, watched: _Watched) -> None:
        child = watched.child
        if child.is_alive or not child.autorestart:
            watched.due_s = None
        elif watched.due_s is None:
            self._schedule_restart(watched)
        elif time.monotonic() >= watched.due_s:
            watched.due_s = None
            self._launch(child)

    def _launch(self, child: ChildProcess) -> None:
        """Start a child. One that cannot be started counts as ended."""
        try:
            child.launch()
        except (OSError, LaunchError) as error:
            self._report(LaunchError(f"{child.name} cannot be started: {error}"))

    def _schedule_restart(self, watched: _Watched) -> None:
        now = time.monotonic()
        if now - watched.child.started_s >= _STABLE_S:
            watched.backoff_s = _FIRST_BACKOFF_S
        watched.due_s = now + watched.backoff_s
        watched.backoff_s = min(2 * watched.backoff_s, _MAX_BACKOFF_S)
        try:
            watched.child.check()
        except LaunchError as end:
            self._report(end)

    def _report(self, end: LaunchError) -> None:
        """Call `on_end`, which may fail, such as one that writes to a closed terminal."""
        with suppress(Exception):
            self._on_end(end)
