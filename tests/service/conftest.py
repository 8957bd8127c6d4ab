"""Fixtures of the tests of HTTP/2: a client, and how much a server receives at once."""

from collections.abc import AsyncIterator

import pytest
from http2_peer import LIMITS, Peer

from quire.service.http2 import frames


@pytest.fixture
def long_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a `Peer` sends is received at once, however slow the machine is."""
    monkeypatch.setattr("quire.service.http2.server_connection._MAX_SLICE_S", 60.0)


@pytest.fixture
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    """A client whose preface and settings were received; a parameter is the server's limits."""
    peer = Peer(getattr(request, "param", LIMITS))
    peer.send(frames.PREFACE, frames.pack_settings({}))
    await peer.received()
    yield peer
    await peer.close()
