"""Fixtures: short socket paths, and an HTTP/2 client."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http2_peer import Peer

from quire.service.http2 import frames


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Unix socket paths are limited to 107 bytes.
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def long_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a `Peer` sends is received at once, however slow the machine is."""
    monkeypatch.setattr("quire.service.http2.server_connection._MAX_SLICE_S", 60.0)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    """A client whose preface and settings were received."""
    peer = Peer()
    peer.send(frames.PREFACE, frames.pack_settings({}))
    await peer.received()
    yield peer
    await peer.close()
