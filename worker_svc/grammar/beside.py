"""One call at a time beside the calling thread."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_Calls = SimpleQueue[Callable[[], object] | None]
_Errors = SimpleQueue[BaseException | None]


class BesideThread:
    """A thread and one call at a time, without the locks and futures of an executor, which every
    step would pay. Not thread-safe."""

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._errors: _Errors = SimpleQueue()
        arguments = self._calls, self._errors
        threading.Thread(target=_run, args=arguments, name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def begin(self, call: Callable[[], object]) -> None:
        """Each call must be joined before the next one."""
        self._calls.put(call)

    def join(self) -> None:
        """Wait for the call that was begun, and raise its error."""
        error = self._errors.get()
        if error is not None:
            raise error


def _run(calls: _Calls, errors: _Errors) -> None:
    while (call := calls.get()) is not None:
        error = None
        try:
            call()
        except BaseException as raised:
            # Raised again where the call is joined.
            error = raised
        errors.put(error)
        # Held no longer than needed.
        del call, error
