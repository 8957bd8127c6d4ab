"""Redis keys that may outlive a scheduler, and the rate of arrivals."""

import pytest

from scheduler_svc.lane import multi_step


@pytest.fixture
def lasting_keys(lasting_keys: list[str]) -> list[str]:
    """Pools of workers that may reconnect, and requests that have not ended."""
    return [*lasting_keys, "quire:{shard:*}:pool:*", "quire:{shard:*}:request:*"]


@pytest.fixture
def any_arrival_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of several rounds, however recent the last arrival is."""
    monkeypatch.setattr(multi_step, "_SHARE", 1000)
