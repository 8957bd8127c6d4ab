"""Requests without an attached stream: they run on for a grace period and are then cancelled."""

import asyncio
import time
from collections.abc import Callable

from scheduler_svc.core.sequence import Group

# Sequences of requests whose clients have disconnected: a quarter of a worker's default batch, so
# that they cannot starve live requests.
_MAX_ABANDONED_SEQUENCES = 64


class Orphans:
    """Calls `cancel` for each orphan whose grace period has passed, and for the oldest of those
    whose client has disconnected while these have too many sequences: it is the least likely to be
    resumed. Requests of lost gateways are not limited, as their clients resume elsewhere.

    The time in which Redis is unavailable does not count: no client can resume then, and the others
    make no progress.
    """

    def __init__(
        self,
        grace_s: float,
        cancel: Callable[[Group], object],
        unavailable_s: Callable[[], float],
    ) -> None:
        """`unavailable_s`: the time in which Redis was unavailable so far."""
        self._grace_s = grace_s
        self._cancel = cancel
        self._unavailable_s = unavailable_s
        self._timers: dict[Group, asyncio.TimerHandle] = {}
        # Those whose client has disconnected, oldest first.
        self._abandoned: dict[Group, None] = {}

    def add(self, group: Group, client_gone: bool) -> None:
        """Start a request's grace period. `client_gone`: only its client has disconnected."""
        self.remove(group)
        self._start(group, client_gone, self._grace_of(group, client_gone))
        if client_gone:
            group.is_abandoned = True
            self._abandoned[group] = None
            self._limit_abandoned()

    def remove(self, group: Group) -> None:
        group.is_abandoned = False
        self._abandoned.pop(group, None)
        if timer := self._timers.pop(group, None):
            timer.cancel()

    def close(self) -> None:
        """Stop all timers."""
        for group in list(self._timers):
            self.remove(group)

    def _grace_of(self, group: Group, client_gone: bool) -> float:
        window_s, deadline_ms = group.record.resume_window_s, group.record.deadline_ms
        if window_s:
            return window_s if client_gone else max(window_s, self._grace_s)
        if deadline_ms is None:
            return self._grace_s
        # No client waits beyond its deadline.
        return min(self._grace_s, max(0.0, deadline_ms / 1000 - time.time()))

    def _limit_abandoned(self) -> None:
        num_sequences = sum(group.num_live for group in self._abandoned)
        while num_sequences > _MAX_ABANDONED_SEQUENCES:
            oldest = next(iter(self._abandoned))
            num_sequences -= oldest.num_live
            self.remove(oldest)
            self._cancel(oldest)

    def _start(self, group: Group, client_gone: bool, seconds: float) -> None:
        self._timers[group] = asyncio.get_running_loop().call_later(
            seconds, self._expire, group, client_gone, self._unavailable_s()
        )

    def _expire(self, group: Group, client_gone: bool, unavailable_s: float) -> None:
        """Cancel the request, or wait as long again as Redis was unavailable since the timer was
        started, when this was `unavailable_s`."""
        lost_s = min(self._unavailable_s() - unavailable_s, self._grace_of(group, client_gone))
        if lost_s > 0:
            self._start(group, client_gone, lost_s)
        else:
            self.remove(group)
            self._cancel(group)
