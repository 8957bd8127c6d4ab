"""The one thread that touches the device."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DeviceThread:
    """Runs calls one after the other, in the order they were submitted.

    A queued call can be cancelled by its future, one that runs cannot. The thread does not keep
    the process alive.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call; after `stop` its future is cancelled."""
        future: Future[T] = Future()
        if self._stopped:
            future.cancel()
        else:
            self._calls.put((future, call))
        return future

    def stop(self, wait_s: float) -> bool:
        """Ends the thread after the calls submitted so far; True if it has ended within the wait.

        An interpreter that goes away while the thread is inside torch takes the process with it.
        """
        self._stopped = True
        self._calls.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                # Whoever submitted the call deals with it.
                future.set_exception(error)
