"""A store and a pool on the session's Redis."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from quire.launcher.redis import EmbeddedRedis
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.store import Store

LostReplies = Callable[[], AbstractContextManager[None]]


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store.at(redis_url)
    await store.lease.acquire("first", lease_ms=3000)
    yield store
    await store.close()


@pytest.fixture
async def standby(redis_url: str) -> AsyncIterator[Store]:
    """Another scheduler's store, which does not lead."""
    store = Store.at(redis_url)
    yield store
    await store.close()


@pytest.fixture
async def successor(standby: Store, store: Store) -> Store:
    """A scheduler that has acquired the lease from `store`."""
    await standby.lease.acquire("second", lease_ms=0)
    return standby


@pytest.fixture
def lost_replies(monkeypatch: pytest.MonkeyPatch) -> LostReplies:
    """Within its context scripts are executed, but their replies are lost."""
    run = Connection.run

    async def deaf(connection: Connection, *args: Any) -> None:
        await run(connection, *args)
        raise StoreUnavailable("the reply is lost")

    @contextmanager
    def lost() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "run", deaf)
            with pytest.raises(StoreUnavailable):
                yield

    return lost


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server that the test may stop."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    yield server.start()
    server.stop()


@pytest.fixture
async def pool(store: Store) -> AsyncIterator[Pool]:
    """Ten blocks and the null block, open; the first step is 2."""
    pool = store.pool(incarnation=0xFEED, num_blocks=11)
    assert await pool.open(last_finished_step=0) == 1
    yield pool
    await store.pool(pool.incarnation, pool.num_blocks).drop()
