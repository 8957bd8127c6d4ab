"""The division of a batch of attention into work items."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from kernel_internals import attention_items, choose_partition_keys

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
    partial: int


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
    return [Item(*numbers[i : i + 8]) for i in range(0, len(numbers), 8)]


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
    assert {item.partial for item in items([num_tokens], [num_tokens])} == {-1}


def test_decoded_tokens_of_many_sequences_are_not_partitioned() -> None:
    work = items([1] * 64, [200] * 64)
    assert [item.partial for item in work] == [-1] * 64
    assert {(item.first_head, item.num_heads) for item in work} == {(0, 4)}


@pytest.mark.parametrize("num_threads", [2, 3, 16])
def test_one_long_sequence_keeps_all_threads_busy(num_threads: int) -> None:
    work = items([1], [16_384], num_threads=num_threads)
    assert len(work) >= num_threads
    keys = [item.end_key - item.first_key for item in work]
    assert max(keys) <= 16_384 / num_threads
    assert sorted(item.partial for item in work) == list(range(len(work)))


@pytest.mark.parametrize(
    ("num_threads", "parts"),
    [(2, {(0, 2), (2, 2)}), (3, {(0, 1), (1, 1), (2, 2)}), (8, {(n, 1) for n in range(4)})],
)
@pytest.mark.parametrize("num_keys", [1, 200, 1000])
def test_one_short_sequence_is_divided_by_its_heads(
    num_keys: int, num_threads: int, parts: set[tuple[int, int]]
) -> None:
    work = items([1], [num_keys], num_threads=num_threads)
    assert {(item.first_head, item.num_heads) for item in work} == parts
    assert {(item.first_key, item.end_key, item.partial) for item in work} == {(0, num_keys, -1)}


def test_short_sequences_that_are_shares_of_a_thread_are_not_divided() -> None:
    for count in (2, 3, 4):
        work = items([1] * count, [200] * count)
        assert [item.num_heads for item in work] == count * [4]


def test_one_thread_shares_nothing() -> None:
    assert [item.num_tokens for item in items([250], [250], num_threads=1)] == 4 * [250]


def test_one_thread_partitions_nothing() -> None:
    assert [item.partial for item in items([1, 1], [16_384, 3], num_threads=1)] == [-1, -1]


def test_the_costly_come_first() -> None:
    work = items([1, 1, 500, 1], [60, 2000, 500, 10])
    costs = [(i.end_key - i.first_key) * i.num_heads * (8 + 2 * i.num_tokens) for i in work]
    assert costs == sorted(costs, reverse=True)


def test_partitions_are_as_many_as_waiting_demands() -> None:
    def choose(num_keys: int, share: float, num_threads: int) -> int:
        return choose_partition_keys(num_keys, share, 1.0, num_threads)

    # Alone on one thread, or a small share of all work: whole.
    assert choose(8192, 1.0, 1) == 8192
    assert choose(8192, 0.1, 2) == 8192
    # Four shares per thread.
    assert choose(8192, 0.99, 2) == 1024
    # Not below what merging is worth.
    assert choose(1000, 0.99, 16) == 256
    for num_keys, share, num_threads in product((1, 255, 257, 10_000), (0.01, 0.6), (1, 2, 64)):
        assert choose(num_keys, share, num_threads) >= 1
