"""What clients have sent and handlers have not read, of all calls of a server together."""

from typing import Final, Protocol

from grpc import StatusCode

from quire.service.errors import RequestError, failed

_RETRY_AFTER_S: Final = 1.0


class Holder(Protocol):
    """A call that holds bytes."""

    def refuse(self, error: RequestError) -> None:
        """End with this error, and hold nothing more."""


class UnreadBytes:
    """Counts them. Beyond the limit the call that holds the most is refused, so that small requests
    are served beside large ones that a client does not complete."""

    def __init__(self, max_bytes: int | None) -> None:
        """None: without a limit."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._held: dict[Holder, int] = {}

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
                failed(
                    StatusCode.RESOURCE_EXHAUSTED,
                    "TOO_MANY_REQUEST_BYTES",
                    f"requests that are being received have {self.num_bytes} bytes, this one "
                    f"{self._held[largest]}; all together may have {self._max_bytes}",
                    _RETRY_AFTER_S,
                    metadata={"resumable": "true"},
                )
            )
