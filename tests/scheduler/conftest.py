"""Redis keys that may outlive a scheduler."""

import pytest


@pytest.fixture
def lasting_keys(lasting_keys: list[str]) -> list[str]:
    """Pools of workers that may reconnect, and requests that have not ended."""
    return [*lasting_keys, "quire:{shard:*}:pool:*", "quire:{shard:*}:request:*"]
