"""A thread that starts child processes."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


class Spawner:
    """Calls functions in a thread that ends at `close`.

    Linux sends the parent-death signal when the *thread* that started a child ends, and a caller's
    thread may end before its stack. A daemon thread, because those of a pool end before `atexit`.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="quire-spawner", daemon=True).start()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Return or raise what `function` does."""
        future: Future[_Result] = Future()
        self._jobs.put(lambda: _complete(future, function))
        return future.result()

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            job()


def _complete(future: Future[_Result], function: Callable[[], _Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
