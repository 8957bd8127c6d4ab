from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import Admission, Commit

NULL, FREE, CACHED, HELD = range(4)


async def test_a_map_has_the_kind_of_each_block(pool: Pool) -> None:
    assert await pool.block_map() == bytes([NULL, *[FREE] * 10])
    admissions = (
        Admission(1, 0, (), 3, fill_hashes=(bytes([1]) * 32, bytes([2]) * 32)),
        Admission(2, 0, (), 2, fill_hashes=(bytes([3]) * 32,)),
    )
    await pool.commit(Commit(2, admissions=admissions))
    assert await pool.block_map() == bytes([NULL, *[HELD] * 5, *[FREE] * 5])
    await pool.commit(Commit(3, returned_blocks=(3, 2, 1)))
    kinds = bytes([NULL, CACHED, CACHED, FREE, HELD, HELD, *[FREE] * 5])
    assert await pool.block_map() == kinds
    assert await pool.reset_prefix_cache() == 3
    assert await pool.block_map() == kinds.replace(bytes([CACHED]), bytes([FREE]))


async def test_a_missing_pool_has_no_map(pool: Pool) -> None:
    await pool.drop()
    assert await pool.block_map() == b""
