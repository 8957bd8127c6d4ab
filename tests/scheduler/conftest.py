"""What a scheduler leaves in Redis for the next one."""

import pytest


@pytest.fixture
def lasting_keys(lasting_keys: list[str]) -> list[str]:
    """The pools of workers that may come back, and requests that nobody has ended."""
    return [*lasting_keys, "quire:{pool:*", "quire:{request:*"]
