"""Starts again what has ended, as a container engine does with `restart: unless-stopped`."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.launcher.child import ChildProcess
from quire.launcher.errors import LaunchError

_POLL_S = 0.05
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
# A process that has lived so long has the first delay again.
_SETTLED_S = 5.0


@dataclass
class _Watched:
    """A child, and what its next start waits for."""

    child: ChildProcess
    delay_s: float = _FIRST_DELAY_S
    # By the monotonic clock; None while the child lives.
    due_s: float | None = None


class Supervisor:
    """Watches children from now until `close`, and starts again those that end, unless they are
    retired: at once after a long life, later and later where lives are short.

    `on_end` hears, in this object's own thread, how each came to its end.
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
        """Nothing is started any more when this returns."""
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closed.wait(_POLL_S):
            for watched in self._watched:
                self._look_at(watched)

    def _look_at(self, watched: _Watched) -> None:
        child = watched.child
        if child.is_alive or child.retired:
            watched.due_s = None
        elif watched.due_s is None:
            self._note_end(watched)
        elif time.monotonic() >= watched.due_s:
            watched.due_s = None
            self._launch(child)

    def _launch(self, child: ChildProcess) -> None:
        """One that cannot be started counts as one that has ended again."""
        try:
            child.launch()
        except (OSError, LaunchError) as error:
            self._on_end(LaunchError(f"{child.name} cannot be started: {error}"))

    def _note_end(self, watched: _Watched) -> None:
        now = time.monotonic()
        if now - watched.child.started_s >= _SETTLED_S:
            watched.delay_s = _FIRST_DELAY_S
        watched.due_s = now + watched.delay_s
        watched.delay_s = min(2 * watched.delay_s, _LONGEST_DELAY_S)
        try:
            watched.child.check()
        except LaunchError as end:
            self._on_end(end)
