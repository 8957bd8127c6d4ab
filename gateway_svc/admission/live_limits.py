"""Limits of one gateway on its live calls and the bytes of their requests."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from quire.service.errors import RequestError, failed, unavailable

_RETRY_AFTER_S = 1.0


class LiveLimits:
    """Counts live calls and the bytes of their requests, and refuses calls beyond the limits.

    A stopping gateway refuses all new calls.
    """

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.num_calls = 0
        self.num_bytes = 0
        # Calls that began since the start, refused ones included.
        self.num_attempts = 0
        self.is_stopping = False
        self._max_calls = max_calls
        self._max_bytes = max_bytes

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Count a call and its request's bytes during the block. RequestError beyond a limit."""
        self.num_attempts += 1
        self._check(num_bytes)
        self.num_calls += 1
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_calls -= 1
            self.num_bytes -= num_bytes

    def _check(self, num_bytes: int) -> None:
        if self.is_stopping:
            raise stopping()
        if self.num_calls >= self._max_calls:
            raise _exhausted(
                "TOO_MANY_CALLS", f"the gateway serves {self.num_calls} calls, its maximum"
            )
        if self.num_bytes + num_bytes > self._max_bytes and self.num_calls:
            raise _exhausted(
                "TOO_MANY_REQUEST_BYTES",
                f"the request has {num_bytes} bytes, those of live calls {self.num_bytes}; the "
                f"gateway holds at most {self._max_bytes}",
            )


def stopping() -> RequestError:
    """The error of calls that a stopping gateway refuses or ends."""
    return unavailable("STOPPING", "the gateway is stopping", metadata={"resumable": "true"})


def _exhausted(reason: str, message: str) -> RequestError:
    return failed(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        reason,
        message,
        _RETRY_AFTER_S,
        metadata={"resumable": "true"},
    )
