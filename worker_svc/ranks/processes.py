"""The other ranks of a worker on one host: child processes that end with it, and it with them."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from worker_svc.settings import WorkerSettings

# What a follower gets to end by itself.
_STOP_S: Final = 5.0


class FollowerProcesses:
    """Ranks 1 and up. They get the settings by a pipe, and end when it is closed, whatever ends
    this process."""

    def __init__(
        self,
        settings: WorkerSettings,
        size: int,
        port: int,
        on_lost: Callable[[str], object],
    ) -> None:
        """`port` is that of the store. `on_lost` is called with the reason when a rank ends, on
        another thread."""
        self._on_lost = on_lost
        self._stopping = False
        self._message = settings.model_dump_json().encode() + b"\n"
        self._watching: list[threading.Thread] = []
        self._processes = [self._start(rank, size, port) for rank in range(1, size)]

    def expect_end(self) -> None:
        """To be called before the ranks are stopped."""
        self._stopping = True

    def stop(self) -> None:
        """Close the pipes, and kill what does not end."""
        self.expect_end()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._join()

    def kill(self) -> None:
        """End them at once."""
        self.expect_end()
        for process in self._processes:
            process.kill()
        self._join()

    def _join(self) -> None:
        for thread in self._watching:
            thread.join()

    def _start(self, rank: int, size: int, port: int) -> subprocess.Popen[bytes]:
        started: Future[subprocess.Popen[bytes]] = Future()

        def run() -> None:
            # The parent-death signal is that of the thread which starts a process, so this one
            # stays until the process ends.
            try:
                started.set_result(_start(rank, size, port, self._message))
            except BaseException as error:
                started.set_exception(error)
                return
            self._watch(rank, started.result())

        thread = threading.Thread(target=run, name=f"rank-{rank}", daemon=True)
        thread.start()
        self._watching.append(thread)
        return started.result()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._stopping:
            self._on_lost(f"rank {rank} (process {process.pid}) has ended with status {status}")


def _start(rank: int, size: int, port: int, message: bytes) -> subprocess.Popen[bytes]:
    rendezvous = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "worker_svc.ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **rendezvous},
    )
    assert process.stdin is not None
    # One that has already ended is reported by its status.
    with suppress(BrokenPipeError):
        process.stdin.write(message)
        process.stdin.flush()
    return process
