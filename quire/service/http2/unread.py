"""What clients have sent and handlers have not read, or have not sent yet, of all calls of a server
together; and how long a client may send nothing of a request, or take nothing of a response."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from grpc import StatusCode

from quire.service.errors import RequestError, failed
from quire.service.http2.compression import Decompressor

# Longest time between two parts of the request of a call that has only one.
SILENCE_S: Final = 30.0
# Longest time in which a client takes nothing of a response that is there for it: its call would
# hold its place for ever.
TAKING_S: Final = 300.0
_RETRY_AFTER_S: Final = 1.0


class Holder(Protocol):
    """A call that holds bytes, or waits for them."""

    def refuse(self, error: RequestError) -> None:
        """End with this error, and hold nothing more."""


class UnreadMessages:
    """Counts their bytes, and the calls that wait for one. Beyond a limit the call that holds the
    most, or has waited longest, is refused: messages that clients send at once are served beside
    those that they do not complete."""

    def __init__(self, max_bytes: int | None, max_waiting: int | None = None) -> None:
        """None: without a limit."""
        self.num_bytes = 0
        self.decompressor = Decompressor()
        self._max_bytes = max_bytes
        self._held: dict[Holder, int] = {}
        self._max_waiting = max_waiting
        # As a dict it is in the order of their arrival.
        self._waiting: dict[Holder, None] = {}

    @contextmanager
    def waiting(self, holder: Holder) -> Iterator[None]:
        """A call waits for a message of its client during the block."""
        self._waiting[holder] = None
        if self._max_waiting is not None and len(self._waiting) > self._max_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.refuse(
                _exhausted(
                    "TOO_MANY_CALLS",
                    f"{self._max_waiting} calls wait for their requests, the maximum; this one has "
                    "waited longest",
                )
            )
        try:
            yield
        finally:
            self._waiting.pop(holder, None)

    def set(self, holder: Holder, num_bytes: int) -> None:
        """A call holds so many bytes now."""
        if self._max_bytes is None:
            return
        added = num_bytes - self._held.get(holder, 0)
        self.num_bytes += added
        if num_bytes:
            self._held[holder] = num_bytes
        else:
            self._held.pop(holder, None)
        # A call that is alone has a limit of its own.
        while added > 0 and self.num_bytes > self._max_bytes and len(self._held) > 1:
            largest = max(self._held, key=lambda other: self._held[other])
            largest.refuse(
                _exhausted(
                    "TOO_MANY_REQUEST_BYTES",
                    f"requests that are being received have {self.num_bytes} bytes, this one "
                    f"{self._held[largest]}; all together may have {self._max_bytes}",
                )
            )


def not_sent(silence_s: float | None) -> RequestError:
    """The error of a call whose client has not sent its request."""
    message = f"no byte of the request has arrived for {silence_s:g} s"
    return failed(StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT", message)


def not_taken(silence_s: float) -> RequestError:
    """The error of a call whose client does not take its response."""
    message = f"no byte of the response was taken for {silence_s:g} s"
    details = {"resumable": "true"}
    return failed(StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", message, metadata=details)


def _exhausted(reason: str, message: str) -> RequestError:
    return failed(
        StatusCode.RESOURCE_EXHAUSTED,
        reason,
        message,
        _RETRY_AFTER_S,
        metadata={"resumable": "true"},
    )
