"""Limits the time of a frame, or of a block of headers, from its first byte to its last."""

from typing import Final

from quire.service.http2.frames import FrameReader
from quire.service.http2.headers import HeaderBlocks

# A frame has 64 KiB at most, as have the headers of a call that is accepted: 18 kbit/s, which slow
# clients exceed.
_MAX_S: Final = 30.0


class Incomplete:
    """What a connection has received in part. It is looked at from time to time, so that frames
    cost nothing."""

    def __init__(self, frames: FrameReader, headers: HeaderBlocks) -> None:
        self._frames, self._headers = frames, headers
        # What was incomplete at the last look, and when that was seen first.
        self._part: tuple[str, int] | None = None
        self._seen_at = 0.0

    def is_overdue(self, now_s: float) -> bool:
        """Whether the same frame or block has been incomplete for too long."""
        part = self._current()
        if part != self._part:
            self._part, self._seen_at = part, now_s
        return part is not None and now_s - self._seen_at >= _MAX_S

    def _current(self) -> tuple[str, int] | None:
        if not self._headers.is_empty:
            return "block", self._headers.num_begun
        return None if self._frames.is_empty else ("frame", self._frames.num_waits)
