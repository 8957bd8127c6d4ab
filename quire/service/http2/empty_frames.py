"""Limits the frames of a connection that carry nothing, such as pings."""

from collections.abc import Sized
from typing import Final

from quire.service.http2 import frames
from quire.service.http2.frames import FloodError, Frame

_CARRIERS: Final = frozenset({frames.DATA, frames.HEADERS, frames.WINDOW_UPDATE})
# And as many as there may be calls, so that cancelling all of them is permitted.
_MAX_AT_ONCE: Final = 10_000
_MAX_PER_S: Final = 1000
# Settings may change the windows of all calls: those of so many take as long as another frame.
_CALLS_PER_FRAME: Final = 100


class EmptyFrames:
    """Counts them."""

    def __init__(self, max_calls: int, calls: Sized) -> None:
        """`calls`: of the connection, as they are at each frame."""
        self._max_calls, self._calls = max_calls, calls
        self._num_counted, self._counted_at = 0.0, 0.0

    def count(self, frame: Frame, now_s: float) -> None:
        """Count a frame that was received now; one that carries something does not count.
        FloodError if there are too many."""
        if frame.payload and frame.kind in _CARRIERS:
            return
        if frame.kind == frames.DATA and frame.flags & frames.END_STREAM:
            return
        since_s, self._counted_at = now_s - self._counted_at, now_s
        self._num_counted = max(self._num_counted - since_s * _MAX_PER_S, 0.0) + 1
        if frame.kind == frames.SETTINGS and frame.payload:
            self._num_counted += len(self._calls) / _CALLS_PER_FRAME
        if self._num_counted > max(_MAX_AT_ONCE, self._max_calls):
            raise FloodError("too many frames that carry nothing")
