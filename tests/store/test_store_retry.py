"""Calls that are repeated while Redis is unavailable."""

import pytest
from structlog.testing import capture_logs

from scheduler_svc.store import retry
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.retry import retry_unavailable


async def test_a_call_logs_the_begin_and_the_end_of_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0)
    outcomes = iter([StoreUnavailable("refused"), StoreUnavailable("refused"), 7])

    async def call() -> int:
        outcome = next(outcomes)
        if isinstance(outcome, StoreUnavailable):
            raise outcome
        return outcome

    with capture_logs() as logs:
        assert await retry_unavailable(call) == 7
    assert [entry["event"] for entry in logs] == ["waiting for Redis", "Redis is available again"]
