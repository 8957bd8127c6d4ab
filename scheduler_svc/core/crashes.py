"""Weighs the crashes of workers as evidence against the request that each of them ran alone."""

from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from scheduler_svc.store.requests import RequestKey

# A request fails after so many conclusive crashes in a row, or so many of any kind.
MAX_CONCLUSIVE: Final = 3
MAX_CRASHES: Final = 6
# For this time the crash of a worker that did not run a request speaks for it.
MEMORY_S: Final = 60.0


@dataclass(slots=True)
class LoneCrashes:
    """Workers that crashed in a row while a sequence ran alone; reset when one of them does not.

    A crash is conclusive if its worker had run other sequences since the sequence's last crash, and
    if no worker that did not run the request crashed in the last minute. Such crashes have another
    cause, which may be that of this one, too.
    """

    num_conclusive: int = 0
    num_crashes: int = 0

    def add(self, is_conclusive: bool) -> None:
        self.num_crashes += 1
        self.num_conclusive += is_conclusive

    def clear(self) -> None:
        self.num_crashes = self.num_conclusive = 0


@dataclass(frozen=True, slots=True)
class _Crash:
    at: float
    requests: Set[RequestKey]


class CrashHistory:
    """The crashes of all workers in the last minute, with the requests that each of them ran."""

    def __init__(self) -> None:
        self._crashes: deque[_Crash] = deque()

    def add(self, requests: Set[RequestKey], at: float) -> None:
        """Add a crash at a time of time.monotonic; times do not decrease."""
        self._crashes.append(_Crash(at, requests))
        self._forget(at)

    def has_other(self, request: RequestKey, now: float) -> bool:
        """Whether a worker crashed in the last minute without running the request."""
        self._forget(now)
        return any(request not in crash.requests for crash in self._crashes)

    def _forget(self, now: float) -> None:
        while self._crashes and self._crashes[0].at < now - MEMORY_S:
            self._crashes.popleft()
