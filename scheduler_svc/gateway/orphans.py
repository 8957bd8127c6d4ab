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
    resumed. Requests of lost gateways are not limited, as their clients resume elsewhere."""

    def __init__(self, grace_s: float, cancel: Callable[[Group], object]) -> None:
        self._grace_s = grace_s
        self._cancel = cancel
        self._timers: dict[Group, asyncio.TimerHandle] = {}
        # Those whose client has disconnected, oldest first.
        self._abandoned: dict[Group, None] = {}

    def add(self, group: Group, client_gone: bool) -> None:
        """Start a request's grace period. `client_gone`: only its client has disconnected."""
        self.remove(group)
        loop = asyncio.get_running_loop()
        self._timers[group] = loop.call_later(
            self._grace_of(group, client_gone), self._expire, group
        )
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

    def _expire(self, group: Group) -> None:
        self.remove(group)
        self._cancel(group)
