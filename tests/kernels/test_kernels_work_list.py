"""The division of a batch of attention into work items."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_internals import (
    attention_items,
    choose_packed_partition,
    choose_streamed_partition,
)

from kernels.dispatch import cpp_implementations

pytestmark = pytest.mark.skipif(not cpp_implementations(), reason="there is no compiler")


@dataclass(frozen=True)
class Item:
    seq: int
    first_head: int
    num_heads: int
    first_token: int
    num_tokens: int
    first_key: int
    end_key: int
    partition_keys: int
    partials_at: int
    partial_floats: int

    @property
    def num_partitions(self) -> int:
        return max(1, -(-(self.end_key - self.first_key) // self.partition_keys))


def items(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int] = (8, 4),
    head_dim: int = 64,
    window: int = 0,
    partition_keys: int = 0,
    num_threads: int = 2,
) -> list[Item]:
    numbers = attention_items(
        query_lens, seq_lens, heads, head_dim, window, partition_keys, num_threads
    )
    return [Item(*numbers[i : i + 10]) for i in range(0, len(numbers), 10)]


def num_partials(work: list[Item]) -> int:
    """Those of shared items, whose places adjoin one another."""
    places = sorted(
        (item.partials_at + n * item.partial_floats, item.partial_floats)
        for item in work
        if item.partials_at >= 0
        for n in range(item.num_partitions)
    )
    end = 0
    for begin, floats in places:
        assert begin == end
        end += floats
    return len(places)


@pytest.mark.parametrize("partition_keys", [0, 1, 64])
@pytest.mark.parametrize("window", [0, 1, 50])
@pytest.mark.parametrize("heads", [(8, 4), (5, 1), (200, 1)])
def test_every_query_has_every_key_that_it_sees_once(
    heads: tuple[int, int], window: int, partition_keys: int
) -> None:
    query_lens, seq_lens = [1, 0, 130, 7, 1], [300, 9, 130, 200, 0]
    counts = [
        torch.zeros(heads[1], query_len, seq_len, dtype=torch.int)
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
    ]
    for item in items(query_lens, seq_lens, heads, 64, window, partition_keys):
        counts[item.seq][
            item.first_head : item.first_head + item.num_heads,
            item.first_token : item.first_token + item.num_tokens,
            item.first_key : item.end_key,
        ] += 1
    for seen, query_len, seq_len in zip(counts, query_lens, seq_lens, strict=True):
        positions = torch.arange(seq_len - query_len, seq_len)
        for query, position in enumerate(positions.tolist()):
            first = max(position + 1 - window, 0) if window else 0
            assert (seen[:, query, first : max(position + 1, 0)] == 1).all()
        assert not (seen > 1).any()


def test_many_rows_share_what_is_packed() -> None:
    work = items([250] * 8, [250] * 8)
    assert {item.num_tokens for item in work} == {250}
    # Queries and sums have to stay in a cache.
    for head_dim, num_tokens in ((64, 256), (128, 128), (256, 64)):
        work = items([2048], [2048], head_dim=head_dim)
        assert {item.num_tokens for item in work} == {num_tokens}


def test_a_prompt_is_cut_into_equal_parts() -> None:
    # Two for each of the key heads, none of a token or two.
    lengths = [item.num_tokens for item in items([257] * 8, [257] * 8)]
    assert sorted(lengths) == 32 * [128] + 32 * [129]


def test_one_short_prompt_keeps_all_threads_busy() -> None:
    for num_threads in (2, 3, 8):
        assert len(items([200], [200], num_threads=num_threads)) >= 2 * num_threads


@pytest.mark.parametrize("num_tokens", [200, 300, 512])
def test_a_prompt_is_not_partitioned_where_its_rows_are_work_for_all(num_tokens: int) -> None:
    assert {item.partials_at for item in items([num_tokens], [num_tokens])} == {-1}


def test_decoded_tokens_of_many_sequences_are_not_divided() -> None:
    work = items([1] * 64, [200] * 64)
    assert [item.partials_at for item in work] == [-1] * 64
    assert {(item.first_head, item.num_heads) for item in work} == {(0, 4)}


@pytest.mark.parametrize("num_threads", [2, 3, 16])
def test_one_long_sequence_keeps_all_threads_busy(num_threads: int) -> None:
    work = items([1], [16_384], num_threads=num_threads)
    assert len(work) >= num_threads
    keys = [item.end_key - item.first_key for item in work]
    assert max(keys) <= 16_384 / num_threads
    assert num_partials(work) == 16


@pytest.mark.parametrize(
    ("num_threads", "parts"),
    [(2, {(0, 2), (2, 2)}), (3, {(0, 1), (1, 1), (2, 2)}), (8, {(n, 1) for n in range(4)})],
)
@pytest.mark.parametrize("num_keys", [1, 127])
def test_one_short_sequence_is_divided_by_its_heads(
    num_keys: int, num_threads: int, parts: set[tuple[int, int]]
) -> None:
    work = items([1], [num_keys], num_threads=num_threads)
    assert {(item.first_head, item.num_heads) for item in work} == parts
    keys = {(item.first_key, item.end_key, item.partials_at) for item in work}
    assert keys == {(0, num_keys, -1)}


def test_one_sequence_is_divided_by_its_keys_then_by_its_heads() -> None:
    """Two partitions of 200 keys, the second of which is smaller."""
    halves = [(0, 4, 0, 112, 0), (0, 4, 112, 200, 1)]
    quarters = [(0, 2, 0, 112, 0), (2, 2, 0, 112, 2), (0, 2, 112, 200, 1), (2, 2, 112, 200, 3)]
    for num_threads, parts in ((2, halves), (3, quarters), (4, quarters)):
        work = items([1], [200], num_threads=num_threads)
        assert {i.partition_keys for i in work} == {112}
        divided = [
            (i.first_head, i.num_heads, i.first_key, i.end_key, i.partials_at // i.partial_floats)
            for i in work
        ]
        assert divided == parts
    assert len(items([1], [200], num_threads=8)) == 8


@given(
    num_keys=st.integers(1, 40_000),
    others=st.lists(st.integers(0, 40_000), max_size=5),
    num_threads=st.integers(1, 64),
    num_tokens=st.integers(1, 4),
)
def test_partitions_of_few_rows_depend_on_their_keys_alone(
    num_keys: int, others: list[int], num_threads: int, num_tokens: int
) -> None:
    query_lens = [min(num_tokens, num_keys)] + [1] * len(others)
    work = items(query_lens, [num_keys, *others], num_threads=num_threads)
    assert {i.partition_keys for i in work if i.seq == 0} == {choose_streamed_partition(num_keys)}
    for item in work:
        # Of whole partitions.
        assert item.first_key % item.partition_keys == 0
        is_last = item.end_key == [num_keys, *others][item.seq]
        assert is_last or item.end_key % item.partition_keys == 0
    num_partials(work)


def test_partitions_of_few_rows() -> None:
    chosen = {keys: choose_streamed_partition(keys) for keys in (1, 127, 128, 200, 511, 512, 2048)}
    assert chosen == {1: 1, 127: 127, 128: 64, 200: 112, 511: 256, 512: 128, 2048: 256}
    # As many as a power of two whose square, times 32, is at most the number of keys.
    assert choose_streamed_partition(131_071) == 4096
    assert choose_streamed_partition(131_072) == 2048


def test_short_sequences_that_are_shares_of_a_thread_are_not_divided() -> None:
    for count in (2, 3, 4):
        work = items([1] * count, [200] * count)
        assert [item.num_heads for item in work] == count * [4]


def test_one_thread_shares_nothing() -> None:
    assert [item.num_tokens for item in items([250], [250], num_threads=1)] == 4 * [250]


def test_one_thread_divides_nothing() -> None:
    work = items([1, 1], [16_384, 3], num_threads=1)
    assert [item.partials_at for item in work] == [-1, -1]


def test_the_costly_come_first() -> None:
    work = items([1, 1, 500, 1], [60, 2000, 500, 10])
    costs = [(i.end_key - i.first_key) * i.num_heads * (8 + 2 * i.num_tokens) for i in work]
    assert costs == sorted(costs, reverse=True)


def test_partitions_of_many_rows_are_as_many_as_waiting_demands() -> None:
    choose = choose_packed_partition
    # Alone on one thread, or a small share of all work: whole.
    assert choose(8192, 1.0, 1) == 8192
    assert choose(8192, 0.2, 2) == 8192
    # Four shares per thread.
    assert choose(8192, 1.98, 2) == 1024
    # Not below what merging is worth.
    assert choose(1000, 15.8, 16) == 256
    for num_keys, share, num_threads in product((1, 255, 257, 10_000), (0.01, 0.6), (1, 2, 64)):
        assert choose(num_keys, share * num_threads, num_threads) >= 1
