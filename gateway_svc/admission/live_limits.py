"""Limits of one gateway on its live calls and the bytes of their requests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from quire.service.errors import RequestError, failed, unavailable

_RETRY_AFTER_S = 1.0
# The part of all bytes that one tenant may hold, so that the others have the rest.
_TENANT_SHARE = 0.5

_CALLS, _BYTES, _STOPPING = "TOO_MANY_CALLS", "TOO_MANY_REQUEST_BYTES", "STOPPING"
_TENANT_BYTES = "TOO_MANY_TENANT_BYTES"
# Of all refusals.
REASONS: Final = (_CALLS, _BYTES, _TENANT_BYTES, _STOPPING)


class LiveLimits:
    """Counts live calls and the bytes of their requests, and refuses calls beyond the limits.

    A stopping gateway refuses all new calls.
    """

    def __init__(
        self,
        max_calls: int,
        max_bytes: int,
        on_refused: Callable[[str], object],
    ) -> None:
        """`on_refused` is called with the reason of each refusal, one of `REASONS`."""
        self.num_calls = 0
        self.num_bytes = 0
        # By principal; without those that hold none.
        self.num_bytes_of: dict[str, int] = {}
        # Calls that began since the start, refused ones included.
        self.num_attempts = 0
        self.is_stopping = False
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._on_refused = on_refused

    @contextmanager
    def hold(self, num_bytes: int = 0, principal: str = "") -> Iterator["HeldBytes"]:
        """Count a call and its request's bytes during the block; more bytes may be added as they
        arrive. `principal` is empty without keys. RequestError beyond a limit."""
        self.num_attempts += 1
        self._check_calls()
        held = HeldBytes(self, principal)
        held.add(num_bytes)
        self.num_calls += 1
        try:
            yield held
        finally:
            self.num_calls -= 1
            self.count(principal, -held.num_bytes)

    def count(self, principal: str, num_bytes: int) -> None:
        """Count bytes that a call holds; a negative number is released."""
        self.num_bytes += num_bytes
        self.num_bytes_of[principal] = self.num_bytes_of.get(principal, 0) + num_bytes
        if not self.num_bytes_of[principal]:
            del self.num_bytes_of[principal]

    def check_bytes(self, num_bytes: int, num_held: int, principal: str) -> None:
        """RequestError if a call that holds `num_held` bytes may not hold more. A call that is
        alone may, as its size has a limit of its own."""
        if self.num_bytes + num_bytes > self._max_bytes and self.num_bytes > num_held:
            raise self._exhausted(
                _BYTES,
                f"the request has {num_held + num_bytes} bytes, those of live calls "
                f"{self.num_bytes - num_held}; the gateway holds at most {self._max_bytes}",
            )
        of_tenant = self.num_bytes_of.get(principal, 0)
        share = int(self._max_bytes * _TENANT_SHARE)
        if principal and of_tenant + num_bytes > share and of_tenant > num_held:
            raise self._exhausted(
                _TENANT_BYTES,
                f"the request has {num_held + num_bytes} bytes, those of this API key's tenant's "
                f"other calls {of_tenant - num_held}; a tenant may hold at most {share}",
            )

    def _check_calls(self) -> None:
        if self.is_stopping:
            self._on_refused(_STOPPING)
            raise stopping()
        if self.num_calls >= self._max_calls:
            raise self._exhausted(_CALLS, f"the gateway serves {self.num_calls} calls, its maximum")

    def _exhausted(self, reason: str, message: str) -> RequestError:
        """Report a refusal; return its error."""
        self._on_refused(reason)
        metadata = {"resumable": "true"}
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        return failed(code, reason, message, _RETRY_AFTER_S, metadata=metadata)


class HeldBytes:
    """The bytes of one live call's request."""

    def __init__(self, limits: LiveLimits, principal: str) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._principal = principal

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived. RequestError beyond a limit of the gateway."""
        self._limits.check_bytes(num_bytes, self.num_bytes, self._principal)
        self.num_bytes += num_bytes
        self._limits.count(self._principal, num_bytes)


def stopping() -> RequestError:
    """The error of calls that a stopping gateway refuses or ends."""
    return unavailable(_STOPPING, "the gateway is stopping", metadata={"resumable": "true"})
