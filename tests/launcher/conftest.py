from collections.abc import Iterator

import pytest

from quire.launcher.spawner import Spawner


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    spawner.close()
