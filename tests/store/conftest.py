"""A store and a pool on the session's Redis."""

from collections.abc import AsyncIterator

import pytest

from scheduler_svc.store.pool import Pool
from scheduler_svc.store.store import Store


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = await Store.connect(redis_url)
    yield store
    await store.close()


@pytest.fixture
async def pool(store: Store) -> AsyncIterator[Pool]:
    """Ten blocks and the null block, open; the first step is 2."""
    pool = store.pool(incarnation=0xFEED, num_blocks=11)
    assert await pool.open(last_finished_step=0) == 1
    yield pool
    await store.pool(pool.incarnation, pool.num_blocks).drop()
