"""Requests that nobody is attached to: they run on for a while, then they are cancelled."""

import asyncio
import time
from collections.abc import Callable

from scheduler_svc.core.sequence import Group


class Orphans:
    """`cancel` is called for each whose time is over."""

    def __init__(self, grace_s: float, cancel: Callable[[Group], object]) -> None:
        self._grace_s = grace_s
        self._cancel = cancel
        self._timers: dict[Group, asyncio.TimerHandle] = {}

    def add(self, group: Group, client_gone: bool) -> None:
        """`client_gone`: it is the client that has left, not its gateway."""
        self.remove(group)
        loop = asyncio.get_running_loop()
        self._timers[group] = loop.call_later(
            self._grace_of(group, client_gone), self._expire, group
        )

    def remove(self, group: Group) -> None:
        if timer := self._timers.pop(group, None):
            timer.cancel()

    def close(self) -> None:
        """Cancels nobody more."""
        for group in list(self._timers):
            self.remove(group)

    def _grace_of(self, group: Group, client_gone: bool) -> float:
        window_s, deadline_ms = group.terms.resume_window_s, group.terms.deadline_ms
        if window_s:
            return window_s if client_gone else max(window_s, self._grace_s)
        if deadline_ms is None:
            return self._grace_s
        # Nobody waits for it any longer.
        return min(self._grace_s, max(0.0, deadline_ms / 1000 - time.time()))

    def _expire(self, group: Group) -> None:
        del self._timers[group]
        self._cancel(group)
