"""Heartbeats of the followers, by the store: rank 0 notices one that is stopped or cut off, as a
scheduler notices such a worker."""

import threading
import time
from collections.abc import Callable
from typing import Final

from torch.distributed.distributed_c10d import Store

_INTERVAL_S: Final = 0.5
# That of a scheduler for a worker.
SILENCE_S: Final = 3.0
# While ranks load, other threads may keep the one of the heartbeats waiting.
LOADING_SILENCE_S: Final = 60.0
# Before it ends, rank 0 stops the others, unless it is lost.
_STOP_S: Final = 1.0


def send_heartbeats(store: Store, rank: int, on_lost: Callable[[str], object]) -> None:
    """Count in the store, on another thread, as long as this process runs. The store may have no
    other user. `on_lost` is called with the reason when rank 0 is gone."""

    def send() -> None:
        count = 0
        while True:
            count += 1
            try:
                store.set(_key(rank), str(count))
            except RuntimeError as error:
                time.sleep(_STOP_S)
                on_lost(f"rank 0 is gone: {error}")
                return
            time.sleep(_INTERVAL_S)

    threading.Thread(target=send, name="heartbeats", daemon=True).start()


class HeartbeatMonitor:
    """Watches the heartbeats of all followers that have begun to send them, on another thread."""

    def __init__(self, store: Store, size: int, on_lost: Callable[[str], object]) -> None:
        """The store may have no other user. `on_lost` is called with the reason."""
        self._store = store
        self._on_lost = on_lost
        self._silence_s = LOADING_SILENCE_S
        self._stopped = threading.Event()
        self._last = {rank: (b"", time.monotonic()) for rank in range(1, size)}
        self._thread = threading.Thread(target=_quietly(self._run), name="ranks", daemon=True)

    def start(self) -> None:
        """Watch ranks that load."""
        self._thread.start()

    def expect_passes(self) -> None:
        """Watch ranks that are ready."""
        now = time.monotonic()
        self._last = dict.fromkeys(self._last, (b"", now))
        # After the line above, so that no silence while loading counts.
        self._silence_s = SILENCE_S

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(_INTERVAL_S):
            now = time.monotonic()
            if now - before > _INTERVAL_S + SILENCE_S / 2:
                # This process itself was stopped, and has not read.
                self._last = {rank: (count, now) for rank, (count, _) in self._last.items()}
            before = now
            for rank in self._last:
                self._check(rank, now)

    def _check(self, rank: int, now: float) -> None:
        silence_s = self._silence_s
        count, since = self._last[rank]
        if not self._store.check([_key(rank)]):
            return
        found = self._store.get(_key(rank))
        if found != count:
            self._last[rank] = (found, now)
        elif now - since > silence_s:
            self._stopped.set()
            self._on_lost(f"rank {rank} was silent for {now - since:.1f} s")


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _quietly(work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except RuntimeError:
            # The store is gone: the process ends, or a pass reports it.
            return

    return run
