"""Requests without a stream: when they are cancelled."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.gateway.orphans import Orphans


class Request:
    """The parts of a group that orphans read."""

    def __init__(self) -> None:
        self.num_live = 16
        self.is_abandoned = False
        self.record = SimpleNamespace(resume_window_s=60, deadline_ms=None)


async def test_the_oldest_abandoned_requests_are_ended_beyond_the_bound() -> None:
    ended: list[object] = []
    orphans = Orphans(30, ended.append, lambda: 0.0)
    lost_with_gateway = [Request() for _ in range(10)]
    for request in lost_with_gateway:
        orphans.add(request, client_gone=False)
    abandoned = [Request() for _ in range(6)]
    for request in abandoned:
        orphans.add(request, client_gone=True)
    assert ended == abandoned[:2]
    assert [request.is_abandoned for request in abandoned] == [False] * 2 + [True] * 4
    orphans.close()


class Timers:
    """Timers of an event loop, whose time a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._waiting: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> Any:
        entry = (self.now_s + seconds, lambda: callback(*args))
        self._waiting.append(entry)
        return SimpleNamespace(cancel=lambda: self._cancel(entry))

    def _cancel(self, entry: tuple[float, Callable[[], object]]) -> None:
        self._waiting = [other for other in self._waiting if other is not entry]

    def forward(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while due := [entry for entry in self._waiting if entry[0] <= until_s]:
            entry = min(due, key=lambda one: one[0])
            self._waiting.remove(entry)
            self.now_s = max(self.now_s, entry[0])
            entry[1]()
        self.now_s = until_s


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: timers)
    return timers


@pytest.mark.parametrize("client_gone", [False, True])
def test_the_grace_period_does_not_count_an_outage_of_redis(
    timers: Timers, client_gone: bool
) -> None:
    """This one begins after a second and lasts for 32: longer than the grace period of 10."""
    began_s = timers.now_s
    ended: list[object] = []
    orphans = Orphans(10, ended.append, lambda: min(max(timers.now_s - began_s - 1, 0), 32))
    request = Request()
    request.record.resume_window_s = 10
    orphans.add(request, client_gone)
    timers.forward(41.5)
    assert ended == []
    timers.forward(0.5)
    assert ended == [request]


def test_no_client_waits_beyond_its_deadline(timers: Timers) -> None:
    ended: list[object] = []
    orphans = Orphans(10, ended.append, lambda: timers.now_s)
    request = Request()
    request.record.resume_window_s = None
    request.record.deadline_ms = (time.time() - 1) * 1000
    orphans.add(request, client_gone=False)
    timers.forward(0)
    assert ended == [request]
