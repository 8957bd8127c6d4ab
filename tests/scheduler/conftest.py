"""What a scheduler leaves in Redis for the next one."""

from pathlib import Path

import pytest


@pytest.fixture
def lasting_keys(lasting_keys: list[str]) -> list[str]:
    """The pools of workers that may come back, and requests that nobody has ended."""
    return [*lasting_keys, "quire:{pool:*", "quire:{request:*"]


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Unix socket paths are limited to 107 bytes.
    return tmp_path_factory.mktemp("s")
