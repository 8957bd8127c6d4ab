from collections.abc import Iterator

import pytest
from scripted_server import ScriptedServer

from quire import Client


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.target) as client:
        yield client
