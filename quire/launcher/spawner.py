"""The thread that starts child processes."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


class Spawner:
    """Runs functions in a thread that lives until `close`.

    Linux ties a child to the *thread* that started it, and a caller's thread may end long before
    the stack it started. A daemon thread, because a pool's threads end before `atexit` runs.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="quire-spawner", daemon=True).start()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """What `function` gives or raises."""
        future: Future[_Result] = Future()
        self._jobs.put(lambda: _settle(future, function))
        return future.result()

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            job()


def _settle(future: Future[_Result], function: Callable[[], _Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
