"""Requests that are being checked and tokenized here, of which the scheduler has not heard."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from quire.service.errors import failed


class Preparations:
    """Finds them by their id, for somebody who cancels one."""

    def __init__(self) -> None:
        # An id may be in preparation twice; a cancellation means both.
        self._live: dict[str, set[_Preparation]] = {}

    @contextmanager
    def of(self, request_id: str) -> Iterator[None]:
        """Around a preparation. At its end RequestError if it was cancelled meanwhile."""
        preparation = _Preparation()
        self._live.setdefault(request_id, set()).add(preparation)
        try:
            yield
            if preparation.is_cancelled:
                raise failed(grpc.StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")
        finally:
            self._live[request_id].remove(preparation)
            if not self._live[request_id]:
                del self._live[request_id]

    def cancel(self, request_id: str) -> bool:
        """False if no such request is in preparation."""
        found = self._live.get(request_id, set())
        for preparation in found:
            preparation.is_cancelled = True
        return bool(found)


class _Preparation:
    def __init__(self) -> None:
        self.is_cancelled = False
