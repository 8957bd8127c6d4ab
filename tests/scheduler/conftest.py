"""Fixtures: Redis keys that may outlive a scheduler, and short socket paths."""

from pathlib import Path

import pytest


@pytest.fixture
def lasting_keys(lasting_keys: list[str]) -> list[str]:
    """Pools of workers that may reconnect, and requests that have not ended."""
    return [*lasting_keys, "quire:{shard:*}:pool:*", "quire:{shard:*}:request:*"]


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Unix socket paths are limited to 107 bytes.
    return tmp_path_factory.mktemp("s")
