"""Worked cases of one pool, in literals. Blocks have 16 tokens."""

import asyncio
from array import array
from dataclasses import replace

import pytest
import redis

from scheduler_svc.store.errors import LeadershipLost, PoolFault, StaleEpoch, WrongStep
from scheduler_svc.store.hashing import HashChain, num_matchable_blocks, root_hash
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import (
    Admission,
    Commit,
    CommitReply,
    ForkedSequence,
    JournalEntry,
    PrefixMatch,
    Publication,
    TokenRanges,
)

SHARED = list(range(48))
HASH = bytes(32)
OTHER_HASH = bytes(31) + b"\x01"


def chain(tokens: list[int]) -> tuple[bytes, ...]:
    hashes = HashChain(root_hash(b"model"), block_size=16)
    hashes.extend_to(array("I", tokens))
    return tuple(hashes.hashes)


def admission(sequence_id: int, tokens: list[int], num_hits: int = 0) -> Admission:
    hashes = chain(tokens)
    num_new = -(-len(tokens) // 16) - num_hits
    return Admission(sequence_id, 0, hashes[:num_hits], num_new, hashes[num_hits:])


async def query(pool: Pool, tokens: list[int]) -> PrefixMatch:
    [found] = await pool.match([chain(tokens)[: num_matchable_blocks(len(tokens), 16)]])
    return found


async def test_two_prompts_share_a_prefix_and_return_it(pool: Pool) -> None:
    first, second = SHARED + [100] * 7, SHARED + [200] * 5
    reply = await pool.commit(Commit(2, admissions=(admission(1, first),)))
    assert reply == CommitReply(6, (), ((1, 2, 3, 4),))
    assert await query(pool, second) == PrefixMatch(num_hits=3, num_free_hits=0)
    reply = await pool.commit(Commit(3, admissions=(admission(2, second, num_hits=3),)))
    assert reply == CommitReply(5, (), ((1, 2, 3, 5),))
    assert (await pool.audit()).references == {1: 2, 2: 2, 3: 2, 4: 1, 5: 1}
    await pool.commit(Commit(4, returned_blocks=(4, 3, 2, 1)))
    await pool.commit(Commit(5, returned_blocks=(5, 3, 2, 1)))
    assert (await pool.audit()).free_order == (5, 4, 6, 7, 8, 9, 10, 3, 2, 1)
    assert await query(pool, first) == PrefixMatch(num_hits=3, num_free_hits=3)


async def test_a_prompt_of_whole_blocks_keeps_one_to_compute(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(admission(1, SHARED),)))
    assert await query(pool, SHARED) == PrefixMatch(num_hits=2, num_free_hits=0)
    reply = await pool.commit(Commit(3, admissions=(admission(2, SHARED, num_hits=2),)))
    assert reply.admitted == ((1, 2, 4),)
    # Block 4 has the content of block 3: both are in the index, the first one is hit.
    assert (await pool.audit()).index[chain(SHARED)[2]] == (3, 4)
    reply = await pool.commit(Commit(4, admissions=(admission(3, [*SHARED, 7], num_hits=3),)))
    assert reply.admitted == ((1, 2, 3, 5),)


async def test_an_admission_hits_what_an_earlier_one_of_the_plan_fills(pool: Pool) -> None:
    admissions = (admission(1, [*SHARED, 1]), admission(2, [*SHARED, 2], num_hits=3))
    reply = await pool.commit(Commit(2, admissions=admissions))
    assert reply == CommitReply(5, (), ((1, 2, 3, 4), (1, 2, 3, 5)))


async def test_only_the_admission_that_does_not_fit_is_omitted(pool: Pool) -> None:
    admissions = (Admission(1, 0, (), 8), Admission(2, 0, (), 3), Admission(3, 0, (), 2))
    reply = await pool.commit(Commit(2, admissions=admissions))
    assert reply == CommitReply(0, (), ((1, 2, 3, 4, 5, 6, 7, 8), None, (9, 10)))
    assert set((await pool.audit()).next_indices) == {1, 3}


async def test_hits_on_free_blocks_count_as_needed(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(admission(1, [*SHARED, 1]),)))
    await pool.commit(Commit(3, returned_blocks=(4, 3, 2, 1)))
    hits = chain(SHARED)
    reply = await pool.commit(Commit(4, admissions=(Admission(2, 0, hits, 8),)))
    assert reply == CommitReply(10, (), (None,))
    reply = await pool.commit(Commit(5, admissions=(Admission(2, 0, hits, 7),)))
    assert reply == CommitReply(0, (), ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10),))


async def test_pinned_hits_are_skipped_when_later_blocks_are_evicted(pool: Pool) -> None:
    other = Admission(2, 0, (), 3, tuple(bytes([i]) * 32 for i in range(3)))
    await pool.commit(Commit(2, admissions=(admission(1, [*SHARED, 1]), other)))
    await pool.commit(Commit(3, returned_blocks=(4, 3, 2, 1, 7, 6, 5)))
    assert (await pool.audit()).free_order == (4, 8, 9, 10, 3, 2, 1, 7, 6, 5)
    commit = Commit(4, admissions=(Admission(3, 0, chain(SHARED), 6),))
    assert await pool.commit(commit) == CommitReply(1, (), ((1, 2, 3, 4, 8, 9, 10, 7, 6),))
    assert (await pool.audit()).free_order == (5,)


async def test_an_admission_whose_hits_are_evicted_in_the_plan_is_omitted(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(admission(1, [*SHARED, 1]),)))
    await pool.commit(Commit(3, returned_blocks=(4, 3, 2, 1)))
    admissions = (Admission(2, 0, (), 8), admission(3, [*SHARED, 2], num_hits=3))
    reply = await pool.commit(Commit(4, admissions=admissions))
    # The last block of the prefix is evicted first.
    assert reply == CommitReply(2, (), ((4, 5, 6, 7, 8, 9, 10, 3), None))
    assert await query(pool, [*SHARED, 2]) == PrefixMatch(num_hits=2, num_free_hits=2)


async def test_takes_precede_admissions(pool: Pool) -> None:
    commit = Commit(2, taken_references=(1, 3), admissions=(Admission(2, 0, (), 1),))
    assert await pool.commit(commit) == CommitReply(7, (1, 2), ((3,),))
    assert (await pool.audit()).references == {1: 1, 2: 3, 3: 1}


async def test_returned_blocks_are_free_for_the_same_plan(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 9), Admission(2, 0, (), 1))))
    commit = Commit(3, returned_blocks=tuple(range(9, 0, -1)), taken_references=(1,) * 9)
    assert await pool.commit(commit) == CommitReply(0, tuple(range(1, 10)), ())


async def test_one_free_block_fewer_than_a_step_takes_is_a_fault(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 8),)))
    with pytest.raises(PoolFault, match="3 blocks to take, 2 free"):
        await pool.commit(Commit(3, taken_references=(1, 1, 1)))
    assert await pool.commit(Commit(3, taken_references=(1, 1))) == CommitReply(0, (9, 10), ())


async def test_forks_share_full_blocks_and_own_their_last(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(admission(1, [*SHARED, 1]),)))
    fork = Commit(
        3,
        shared_blocks=(1, 2, 3, 1, 2, 3),
        taken_references=(1, 1),
        added=(ForkedSequence(2, 0), ForkedSequence(3, 4)),
    )
    assert await pool.commit(fork) == CommitReply(4, (5, 6), ())
    audit = await pool.audit()
    assert audit.references == {1: 3, 2: 3, 3: 3, 4: 1, 5: 1, 6: 1}
    assert audit.next_indices == {1: 0, 2: 0, 3: 4}
    await pool.commit(Commit(4, returned_blocks=(4, 3, 2, 1, 6, 3, 2, 1, 5, 3, 2, 1)))
    assert (await pool.audit()).free_order == (5, 6, 4, 7, 8, 9, 10, 3, 2, 1)


async def test_a_block_may_be_shared_and_returned_in_one_call(pool: Pool) -> None:
    await pool.commit(Commit(2, taken_references=(1,)))
    await pool.commit(Commit(3, shared_blocks=(1,), returned_blocks=(1,)))
    assert (await pool.audit()).references == {1: 1}
    await pool.commit(Commit(4, shared_blocks=(1,), returned_blocks=(1, 1)))
    assert (await pool.audit()).references == {}


async def test_a_prompt_equal_to_a_finished_request_hits_its_output_too(store: Store) -> None:
    tokens = list(range(300))  # 100 of a prompt, 200 of output, the last of them not computed
    pool = store.pool(4, num_blocks=31)
    await pool.open(0)
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 7, chain(tokens[:100])),)))
    reply = await pool.commit(Commit(3, taken_references=(1,) * 12))
    table = (*range(1, 8), *reply.taken)
    hashes = chain(tokens[:299])
    publications = [Publication(table[i], hashes[i]) for i in range(6, len(hashes))]
    await pool.commit(
        Commit(4, publications=publications, removed=(1,), returned_blocks=table[::-1])
    )
    assert await query(pool, tokens) == PrefixMatch(num_hits=18, num_free_hits=18)  # 288 tokens
    await pool.drop()


async def test_late_tokens_of_a_preempted_sequence_are_journaled(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(admission(1, [*SHARED, 1]),)))
    await pool.commit(Commit(3, returned_blocks=(4, 3, 2, 1)))
    late = TokenRanges([1], [0], [1], [7])
    await pool.commit(Commit(4, token_ranges=late, removed=(1,)))
    assert await pool.journal() == [JournalEntry(4, late)]
    assert (await pool.audit()).next_indices == {}
    reply = await pool.commit(Commit(5, admissions=(admission(1, [*SHARED, 1], num_hits=3),)))
    assert reply.admitted == ((1, 2, 3, 4),)


async def test_a_sequence_forgotten_in_the_call_may_be_admitted_again(pool: Pool) -> None:
    await pool.commit(Commit(2, added=(ForkedSequence(1, 0), ForkedSequence(2, 0))))
    again = (Admission(1, 5, (), 1), Admission(2, 5, (), 99))
    reply = await pool.commit(Commit(3, removed=(1, 2), admissions=again))
    assert reply.admitted == ((1,), None)
    assert (await pool.audit()).next_indices == {1: 5}


async def test_a_repeated_commit_gets_the_stored_reply(pool: Pool) -> None:
    commit = Commit(2, admissions=(admission(1, SHARED), Admission(2, 0, (), 99)))
    reply = await pool.commit(commit)
    before = await pool.audit()
    assert await pool.commit(commit) == reply == CommitReply(7, (), ((1, 2, 3), None))
    assert await pool.audit() == before


@pytest.mark.parametrize("step", [0, 1, 3, 2**40])
async def test_any_other_step_is_refused(pool: Pool, step: int) -> None:
    with pytest.raises(WrongStep):
        await pool.commit(Commit(step))


RUNNING = Commit(2, admissions=(admission(1, [*SHARED, 1]), Admission(2, 5, (), 1)))


@pytest.mark.parametrize(
    "commit",
    [
        Commit(3, taken_references=(1,) * 7),
        Commit(3, taken_references=(1, 0)),
        Commit(3, token_ranges=TokenRanges([1, 2], [0, 6], [1, 7], [7, 7])),
        Commit(3, token_ranges=TokenRanges([2], [4], [6], [7, 7])),
        Commit(3, token_ranges=TokenRanges([1, 1], [0, 0], [1, 1], [7, 7])),
        Commit(3, token_ranges=TokenRanges([9], [0], [1], [7])),
        Commit(3, shared_blocks=(6,)),
        Commit(3, shared_blocks=(0,)),
        Commit(3, shared_blocks=(11,)),
        Commit(3, returned_blocks=(4, 3, 2, 6)),
        Commit(3, returned_blocks=(1, 1)),
        Commit(3, shared_blocks=(1,), returned_blocks=(1, 1, 1)),
        Commit(3, returned_blocks=(0,)),
        Commit(3, returned_blocks=(11,)),
        Commit(3, publications=(Publication(6, HASH),)),
        Commit(3, publications=(Publication(1, HASH),)),
        Commit(3, publications=(Publication(4, HASH), Publication(4, OTHER_HASH))),
        Commit(3, added=(ForkedSequence(1, 0),)),
        Commit(3, added=(ForkedSequence(3, 0), ForkedSequence(3, 0))),
        Commit(3, added=(ForkedSequence(3, 0),), admissions=(Admission(3, 0, (), 1),)),
        Commit(3, admissions=(Admission(1, 0, (), 1),)),
        Commit(3, admissions=(Admission(3, 0, (), 1), Admission(3, 0, (), 1))),
    ],
)
async def test_a_faulty_commit_changes_nothing(pool: Pool, commit: Commit) -> None:
    await pool.commit(RUNNING)
    before = await pool.audit()
    # The valid parts of a faulty commit are not applied either.
    good = replace(
        commit,
        withdrawals=(2,),
        publications=(Publication(5, HASH), *commit.publications),
        token_ranges=commit.token_ranges
        if commit.token_ranges.token_ids
        else TokenRanges([1], [0], [1], [7]),
        removed=(2,) if not commit.token_ranges.token_ids else (),
        shared_blocks=(2, *commit.shared_blocks),
        returned_blocks=(5, *commit.returned_blocks),
        taken_references=commit.taken_references or (1,),
        added=(ForkedSequence(5, 0), *commit.added),
        admissions=commit.admissions or (Admission(4, 0, (), 1),),
    )
    with pytest.raises(PoolFault):
        await pool.commit(good)
    assert await pool.audit() == before
    assert await pool.journal() == []
    await pool.commit(Commit(3))


async def test_a_block_is_published_once_its_tokens_are_known(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 1),)))
    assert (await pool.match([[HASH]])) == [PrefixMatch(0, 0)]
    publish = (Publication(1, HASH),)
    await pool.commit(Commit(3, publications=publish))
    await pool.commit(Commit(4, publications=publish))  # has no further effect
    assert (await pool.audit()).index == {HASH: (1,)}


async def test_an_ending_sequence_publishes_first(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 2),)))
    commit = Commit(3, publications=(Publication(1, HASH),), returned_blocks=(2, 1))
    await pool.commit(commit)
    assert (await pool.audit()).free_order == (2, 3, 4, 5, 6, 7, 8, 9, 10, 1)
    assert await pool.match([[HASH]]) == [PrefixMatch(1, 1)]


async def test_withdrawing_one_of_equal_hashes_keeps_the_other(pool: Pool) -> None:
    twins = (Admission(1, 0, (), 1, (HASH,)), Admission(2, 0, (), 1, (HASH,)))
    await pool.commit(Commit(2, admissions=twins))
    await pool.commit(Commit(3, withdrawals=(1,)))
    assert (await pool.audit()).index == {HASH: (2,)}
    await pool.commit(Commit(4, withdrawals=(1, 2), returned_blocks=(2,)))
    audit = await pool.audit()
    assert audit.index == {}
    assert audit.free_order[0] == 2
    # Withdrawn and published anew in one call: the new hash is kept.
    await pool.commit(Commit(5, publications=(Publication(1, HASH),)))
    anew = Commit(6, withdrawals=(1,), publications=(Publication(1, OTHER_HASH),))
    await pool.commit(anew)
    assert (await pool.audit()).hashes == {1: OTHER_HASH}


async def test_tokens_are_journaled_step_by_step(pool: Pool) -> None:
    await pool.commit(RUNNING)
    big_id = 2**64 - 1
    ranges = TokenRanges([1, 2], [0, 5], [2, 6], [7, 2**32 - 1, 8])
    await pool.commit(Commit(3, token_ranges=ranges, admissions=(Admission(big_id, 3, (), 1),)))
    await pool.commit(Commit(4))
    last = TokenRanges([big_id, big_id], [3, 4], [4, 5], [1, 2], [b"any", b""])
    await pool.commit(Commit(5, token_ranges=last, removed=(2,)))
    assert await pool.journal() == [JournalEntry(3, ranges), JournalEntry(5, last)]
    assert (await pool.audit()).next_indices == {1: 2, big_id: 5}
    await pool.trim_journal(through_step=3)
    assert await pool.journal() == [JournalEntry(5, last)]


async def test_reopening_frees_held_blocks_from_the_highest_down(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(admission(1, [*SHARED, 1]), Admission(2, 0, (), 2))))
    await pool.commit(Commit(3, token_ranges=TokenRanges([1], [0], [1], [9])))
    assert await pool.open(last_finished_step=3) == 4
    audit = await pool.audit()
    assert audit.free_order == (4, 5, 6, 7, 8, 9, 10, 3, 2, 1)
    assert audit.next_indices == {}
    assert await query(pool, [*SHARED, 1]) == PrefixMatch(num_hits=3, num_free_hits=3)
    assert len(await pool.journal()) == 1  # until it is compacted
    with pytest.raises(WrongStep):
        await pool.commit(Commit(4))
    await pool.commit(Commit(5))
    assert await pool.open(last_finished_step=70) == 71


async def test_reopening_removes_hashes_of_unfinished_steps(pool: Pool) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 1, (HASH,)),)))
    await pool.commit(Commit(3, admissions=(Admission(2, 0, (), 1, (OTHER_HASH,)),)))
    await pool.open(last_finished_step=2)
    assert await pool.match([[HASH], [OTHER_HASH]]) == [PrefixMatch(1, 1), PrefixMatch(0, 0)]


@pytest.mark.parametrize(
    ("last_finished_step", "leader_step", "num_hits"),
    [(2, 0, 1), (2, 2, 1), (3, 0, 0), (2, 3, 0), (0, 3, 0)],
)
async def test_a_pool_behind_what_was_seen_loses_every_hash(
    pool: Pool, last_finished_step: int, leader_step: int, num_hits: int
) -> None:
    await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 1, (HASH,)),)))
    step = await pool.open(last_finished_step, leader_step)
    assert step == max(2, last_finished_step, leader_step) + 1
    assert await pool.match([[HASH]]) == [PrefixMatch(num_hits, num_hits)]
    assert (await pool.audit()).references == {}


async def test_a_pool_without_one_of_its_keys_takes_no_commit_and_begins_anew(
    pool: Pool, redis_client: redis.Redis
) -> None:
    """What Redis has not evicted of it would list blocks twice, or find the wrong ones."""
    keys, step = ShardKeys(0).pool(pool.incarnation), 1
    for key in (*keys.blocks, keys.published):
        await pool.commit(Commit(step + 1, admissions=(Admission(1, 0, (), 3, (HASH,)),)))
        await pool.commit(Commit(step + 2, removed=(1,), returned_blocks=(3, 2)))
        assert redis_client.delete(key) == 1, key
        # Blocks that are taken lose their hashes, which are not found without `hashes`.
        with pytest.raises(PoolFault):
            await pool.commit(Commit(step + 3, admissions=(Admission(2, 0, (), 9),)))
        step = await pool.open(last_finished_step=step + 2)
        audit = await pool.audit()
        assert (audit.num_free, audit.references, audit.hashes) == (10, {}, {}), key
        audit.check()
    await pool.commit(Commit(step + 1, admissions=(Admission(1, 0, (), 1, (HASH,)),)))
    assert await pool.reset_prefix_cache() == 1
    await pool.commit(Commit(step + 2, admissions=(Admission(2, 0, (), 1, (HASH,)),)))


async def test_a_reset_removes_hashes_and_nothing_else(pool: Pool) -> None:
    prompts = (admission(1, [*SHARED, 1]), Admission(2, 0, (), 1, (OTHER_HASH,)))
    await pool.commit(Commit(2, admissions=prompts))
    await pool.commit(Commit(3, returned_blocks=(4, 3, 2, 1)))
    assert await pool.reset_prefix_cache() == 4
    assert await pool.reset_prefix_cache() == 0
    audit = await pool.audit()
    assert (audit.hashes, audit.index, audit.references) == ({}, {}, {5: 1})
    assert audit.free_order == (4, 6, 7, 8, 9, 10, 3, 2, 1)
    assert await query(pool, [*SHARED, 1]) == PrefixMatch(0, 0)


async def test_several_pools_are_matched_in_one_call(
    store: Store, pool: Pool, redis_client: redis.Redis
) -> None:
    empty = store.pool(2, 11)
    plain = store.pool(3, 11, enable_prefix_caching=False)
    await pool.commit(Commit(2, admissions=(admission(1, [*SHARED, 1]),)))
    queries = [chain(SHARED), (OTHER_HASH,)]
    zeros = [PrefixMatch(0, 0)] * 2
    redis_client.script_flush()
    before = store._connection.num_calls
    matches = await store.match_pools([empty, pool, plain], queries)
    assert matches == [zeros, [PrefixMatch(3, 0), PrefixMatch(0, 0)], zeros]
    assert store._connection.num_calls == before + 1
    assert await store.match_pools([plain], queries) == [zeros]
    assert await store.match_pools([pool, empty], []) == [[], []]
    assert store._connection.num_calls == before + 1


async def test_an_earlier_leader_is_refused(store: Store, pool: Pool, successor: Store) -> None:
    assert successor.leadership.epoch > store.leadership.epoch
    await pool.commit(Commit(2))  # the pool still belongs to the earlier leader
    theirs = successor.pool(pool.incarnation, pool.num_blocks)
    step = await theirs.open(last_finished_step=2)
    for refused in (
        pool.commit(Commit(step + 1)),
        pool.open(2),
        pool.trim_journal(2),
        pool.reset_prefix_cache(),
        pool.drop(),
    ):
        with pytest.raises(StaleEpoch):
            await refused
    await theirs.commit(Commit(step + 1))
    await theirs.drop()


async def test_a_new_epoch_of_the_same_store_reopens_the_pool(store: Store, pool: Pool) -> None:
    await store.lease.reacquire("first")
    again = store.pool(pool.incarnation, pool.num_blocks)
    for early in (again.commit(Commit(2)), again.reset_prefix_cache(), again.trim_journal(1)):
        with pytest.raises(LeadershipLost):
            await early
    await again.open(0)
    with pytest.raises(StaleEpoch):
        await pool.commit(Commit(3))


async def test_a_pool_has_one_size(store: Store, pool: Pool) -> None:
    with pytest.raises(PoolFault, match="11 blocks, the worker 12"):
        await store.pool(pool.incarnation, 12).open(0)


async def test_a_missing_pool_is_a_fault(store: Store) -> None:
    with pytest.raises(PoolFault, match="does not exist"):
        await store.pool(1, 11).commit(Commit(1))
    with pytest.raises(PoolFault, match="does not exist"):
        await store.pool(1, 11).audit()
    with pytest.raises(PoolFault, match="does not exist"):
        await store.pool(1, 11).reset_prefix_cache()
    with pytest.raises(PoolFault, match="does not exist"):
        await store.pool(1, 11).trim_journal(1)


async def test_without_prefix_caching_hashes_are_ignored(store: Store) -> None:
    pool = store.pool(2, 11, enable_prefix_caching=False)
    await pool.open(0)
    reply = await pool.commit(Commit(2, admissions=(admission(1, [*SHARED, 1]),)))
    assert reply.admitted == ((1, 2, 3, 4),)
    await pool.commit(Commit(3, publications=(Publication(4, HASH),)))
    assert await query(pool, [*SHARED, 1]) == PrefixMatch(0, 0)
    assert (await pool.audit()).hashes == {}
    await pool.drop()


async def test_more_blocks_than_lua_unpacks_at_once(store: Store) -> None:
    pool = store.pool(3, num_blocks=20_001)
    await pool.open(0)
    hashes = tuple(i.to_bytes(32, "big") for i in range(9000))
    reply = await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 10_000, hashes),)))
    assert reply == CommitReply(10_000, (), (tuple(range(1, 10_001)),))
    assert await pool.match([hashes]) == [PrefixMatch(9000, 0)]
    sharer = Admission(2, 0, hashes, 1000)
    await pool.commit(Commit(3, returned_blocks=tuple(range(10_000, 0, -1))))
    reply = await pool.commit(Commit(4, admissions=(sharer,)))
    assert reply.admitted[0] is not None
    assert reply.admitted[0][:9000] == tuple(range(1, 9001))
    await pool.open(last_finished_step=4)
    audit = await pool.audit()
    assert audit.num_free == 20_000
    assert audit.free_order[-9000:] == tuple(range(9000, 0, -1))
    evict = await pool.commit(Commit(6, admissions=(Admission(3, 0, (), 20_000),)))
    assert evict.num_free_blocks == 0
    assert (await pool.audit()).index == {}
    await pool.drop()


async def test_a_cancelled_caller_does_not_disturb_the_next(pool: Pool) -> None:
    commit = asyncio.ensure_future(pool.commit(Commit(2, admissions=(Admission(1, 0, (), 3),))))
    await asyncio.sleep(0)  # the call has begun
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    # Replies arrive in order, and the step was applied.
    assert await pool.match([[HASH]]) == [PrefixMatch(0, 0)]
    again = await pool.commit(Commit(2, admissions=(Admission(1, 0, (), 3),)))
    assert again == CommitReply(7, (), ((1, 2, 3),))
