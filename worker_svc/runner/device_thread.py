"""The thread that makes all calls to the device."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import structlog

from worker_svc.runner.step_runner import Failed, PendingOutput

log = structlog.get_logger()

T = TypeVar("T")

# Launched steps at once: one that runs, and one queued behind it so that the device never idles.
# With several stages one runs in each.
MAX_IN_FLIGHT: Final = 2
# Delay until the end of a step is noticed while no calls arrive.
_POLL_S = 0.0001


@dataclass(frozen=True)
class _Call:
    future: Future[Any]
    function: Callable[[], Any]
    launches: bool  # returns `PendingOutput`


class DeviceThread:
    """Runs calls one after another, in the order of their submission.

    A queued call can be cancelled by its future, a running one cannot. A call that launches work is
    made while earlier work runs; any other call is made after all launched work has ended. The
    thread does not keep the process alive.
    """

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._max_in_flight = max_in_flight
        self._stopped = False
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._launched: deque[tuple[Future[Any], PendingOutput[Any]]] = deque()
        self._postponed: deque[Callable[[], object]] = deque()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; after `stop` its future is cancelled."""
        return self._queue(call, Future(), launches=False)

    def launch(
        self,
        call: Callable[[], PendingOutput[T]],
        done: Callable[[Future[T]], object] | None = None,
    ) -> Future[T]:
        """Queue a call that launches work; the future gets the work's output. `done` is called on
        the thread when the future is done, or by the caller that cancels it."""
        future: Future[T] = Future()
        if done is not None:
            future.add_done_callback(done)
        return self._queue(call, future, launches=True)

    def postpone(self, call: Callable[[], object]) -> None:
        """Postpone a call until the thread would wait or `run_postponed` is called. To be called on
        the thread."""
        self._postponed.append(call)

    def run_postponed(self) -> None:
        """Make the postponed calls. To be called on the thread."""
        while self._postponed:
            try:
                self._postponed.popleft()()
            except Exception:
                # The thread continues; this log line is the only report of the error.
                log.exception("a postponed call failed")

    def stop(self, wait_s: float) -> bool:
        """End the thread after the calls submitted so far; True if it ended within `wait_s`.

        If it did not, the interpreter must not finalise: a thread inside torch would crash it.
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
                self._complete_all()
                self.run_postponed()
                _resolve(call.future, call.function)
        self._complete_all()
        self.run_postponed()

    def _next(self) -> _Call | None:
        """The next call. Completes launched work while it waits."""
        while self._launched:
            if len(self._launched) < self._max_in_flight:
                try:
                    return self._calls.get_nowait()
                except Empty:
                    self.run_postponed()
                if not _is_ready(self._launched[0][1]):
                    try:
                        return self._calls.get(timeout=_POLL_S)
                    except Empty:
                        continue
            self._complete_oldest()
            # The next launch may take long.
            self.run_postponed()
        try:
            return self._calls.get_nowait()
        except Empty:
            self.run_postponed()
        return self._calls.get()

    def _launch(self, call: _Call) -> None:
        try:
            launched: PendingOutput[Any] = call.function()
        except BaseException as error:
            launched = Failed(error)
        self._launched.append((call.future, launched))
        if _is_ready(launched):
            self._complete_all()

    def _complete_all(self) -> None:
        self.run_postponed()
        while self._launched:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        future, launched = self._launched.popleft()
        _resolve(future, launched.output)


def _is_ready(launched: PendingOutput[Any]) -> bool:
    try:
        return launched.is_ready()
    except BaseException:
        # A lost device raises in the first call; its own output reports the error.
        return True


def _resolve(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        # The submitter of the call handles it.
        future.set_exception(error)
