"""The one thread that touches the device."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import structlog

from worker_svc.step_runner import Failed, Launched

log = structlog.get_logger()

T = TypeVar("T")

# Plans the device has at once: one that it runs and one behind it, for which it need not wait.
MOST_LAUNCHED: Final = 2
# How late the end of a step may be seen while nothing else is to be done.
_POLL_S = 0.0001


@dataclass(frozen=True)
class _Call:
    future: Future[Any]
    function: Callable[[], Any]
    launches: bool  # gives work that is still to end


class DeviceThread:
    """Runs calls one after the other, in the order they were submitted.

    A queued call can be cancelled by its future, one that runs cannot. What was launched ends
    before any other call runs, but the next launch does not wait for it. The thread does not keep
    the process alive.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._launched: deque[tuple[Future[Any], Launched[Any]]] = deque()
        self._held: deque[Callable[[], object]] = deque()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call; after `stop` its future is cancelled."""
        return self._queue(call, Future(), launches=False)

    def launch(
        self,
        call: Callable[[], Launched[T]],
        done: Callable[[Future[T]], object] | None = None,
    ) -> Future[T]:
        """Queues a call that launches something; the future gets its output. `done` is called on
        the thread when it has it, or by whoever cancels it."""
        future: Future[T] = Future()
        if done is not None:
            future.add_done_callback(done)
        return self._queue(call, future, launches=True)

    def hold(self, call: Callable[[], object]) -> None:
        """Has the thread make a call before it waits for anything, or at `make_held_calls` if that
        comes first. To be called on the thread."""
        self._held.append(call)

    def make_held_calls(self) -> None:
        """To be called on the thread."""
        while self._held:
            try:
                self._held.popleft()()
            except Exception:
                # The thread goes on; what was to be told is heard of nowhere else.
                log.exception("a held call failed")

    def stop(self, wait_s: float) -> bool:
        """Ends the thread after the calls submitted so far; True if it has ended within the wait.

        An interpreter that goes away while the thread is inside torch takes the process with it.
        """
        self._stopped = True
        self._calls.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _queue(
        self, function: Callable[[], Any], future: Future[Any], *, launches: bool
    ) -> Future[Any]:
        if self._stopped:
            future.cancel()
        else:
            self._calls.put(_Call(future, function, launches))
        return future

    def _run(self) -> None:
        while (call := self._next()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            if call.launches:
                self._launch(call)
            else:
                self._settle_all()
                self.make_held_calls()
                _resolve(call.future, call.function)
        self._settle_all()
        self.make_held_calls()

    def _next(self) -> _Call | None:
        """The next call; until there is one, launched work is settled as it ends."""
        while self._launched:
            if len(self._launched) < MOST_LAUNCHED:
                try:
                    return self._calls.get_nowait()
                except Empty:
                    self.make_held_calls()
                if not _is_over(self._launched[0][1]):
                    try:
                        return self._calls.get(timeout=_POLL_S)
                    except Empty:
                        continue
            self._settle_oldest()
            # The next call may take long to be launched.
            self.make_held_calls()
        try:
            return self._calls.get_nowait()
        except Empty:
            self.make_held_calls()
        return self._calls.get()

    def _launch(self, call: _Call) -> None:
        try:
            launched: Launched[Any] = call.function()
        except BaseException as error:
            launched = Failed(error)
        self._launched.append((call.future, launched))
        if _is_over(launched):
            self._settle_all()

    def _settle_all(self) -> None:
        self.make_held_calls()
        while self._launched:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        future, launched = self._launched.popleft()
        _resolve(future, launched.output)


def _is_over(launched: Launched[Any]) -> bool:
    try:
        return launched.is_ready()
    except BaseException:
        # A device that is lost says so to whoever asks first; its output says it to the right one.
        return True


def _resolve(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        # Whoever submitted the call deals with it.
        future.set_exception(error)
