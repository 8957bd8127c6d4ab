"""Exchanges between ranks, which are threads here; `tests/worker/test_worker_shared_memory.py` has
processes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kernels.dispatch import Implementation, cpp_implementations
from kernels.exchange import Exchange, ExchangeSizes, sum_reference

pytestmark = pytest.mark.skipif(not cpp_implementations(), reason="needs the C++ kernels")

_SLOT_BYTES = 1024
_LONG_S = 60.0

Run = Callable[[Callable[[int, Exchange], Any]], list[Any]]


def exchanges_of(
    num_ranks: int, timeout_s: float = _LONG_S, processes: Sequence[int] = ()
) -> list[Exchange]:
    sizes = ExchangeSizes(num_ranks, _SLOT_BYTES, 4096)
    memory = torch.zeros(sizes.num_bytes, dtype=torch.uint8)
    last = cpp_implementations()[-1]
    given = processes or [-1] * num_ranks
    return [Exchange(memory, sizes, rank, given, timeout_s, last) for rank in range(num_ranks)]


@contextmanager
def ranks_of(num_ranks: int) -> Iterator[Run]:
    """Calls a function on all ranks at the same time."""
    exchanges = exchanges_of(num_ranks)
    with ThreadPoolExecutor(num_ranks) as threads:
        yield lambda call: list(threads.map(call, range(num_ranks), exchanges, timeout=_LONG_S))


def parts_of(num_ranks: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(num_ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sums_of_all_sizes(num_ranks: int, dtype: torch.dtype) -> None:
    """Among them sizes of a slot, of more than one, and of many."""
    in_slot = _SLOT_BYTES // dtype.itemsize
    with ranks_of(num_ranks) as run:
        for size in (0, 1, 3, 17, in_slot - 1, in_slot, in_slot + 1, 5 * in_slot + 7):
            parts = parts_of(num_ranks, size, dtype)
            expected = sum_reference(parts)
            for found in run(lambda rank, one, parts=parts: one.sum(parts[rank])):  # type: ignore[misc]
                assert torch.equal(found, expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_many_sums_in_a_row(num_ranks: int) -> None:
    """Without other work between them, and with more ranks than cores."""
    num_sums = 200
    parts = [parts_of(num_ranks, 33, torch.float32, seed) for seed in range(num_sums)]

    def add(rank: int, exchange: Exchange) -> list[torch.Tensor]:
        return [exchange.sum(part[rank]) for part in parts]

    with ranks_of(num_ranks) as run:
        for found in run(add):
            for one, part in zip(found, parts, strict=True):
                assert torch.equal(one, sum_reference(part))


def test_messages_and_sums_alternate() -> None:
    """Rank 0 sends without waiting for the others."""
    sizes = [1, 100, _SLOT_BYTES, _SLOT_BYTES + 1, 5000, 7] * 5
    messages = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]

    def follow(rank: int, exchange: Exchange) -> bool:
        is_right = True
        for message in messages:
            received = message.clone() if rank == 0 else torch.zeros_like(message)
            exchange.broadcast(received)
            is_right &= torch.equal(received, message)
            is_right &= exchange.sum(torch.ones(9)).tolist() == [3.0] * 9
        return is_right

    with ranks_of(3) as run:
        assert run(follow) == [True] * 3


def test_columns_are_gathered() -> None:
    def fill(rank: int, exchange: Exchange) -> torch.Tensor:
        columns = exchange.columns(4, 3)
        assert columns is not None
        columns.fill_(rank)
        return exchange.gathered(4, 3).clone()

    with ranks_of(2) as run:
        assert run(fill)[0].tolist() == [[0, 0, 0, 1, 1, 1]] * 4


def test_a_matrix_that_is_too_large_has_no_columns() -> None:
    exchange = exchanges_of(2)[0]
    assert exchange.columns(8, 64) is not None
    assert exchange.columns(9, 64) is None


def test_counts_what_it_costs() -> None:
    def add(rank: int, exchange: Exchange) -> tuple[int, int]:
        for _ in range(3):
            exchange.sum(torch.ones(10))
        usage = exchange.take_usage()
        assert usage.seconds > 0
        assert exchange.take_usage().num_calls == 0
        return usage.num_calls, usage.num_bytes

    with ranks_of(2) as run:
        assert run(add) == [(3, 120), (3, 120)]


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    exchange = exchanges_of(2, timeout_s=0.05)[0]
    with pytest.raises(RuntimeError, match="rank 1 has not arrived at an exchange within 50 ms"):
        exchange.sum(torch.ones(3))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs process descriptors")
@pytest.mark.parametrize("is_message", [False, True])
def test_the_end_of_a_process_ends_the_wait(is_message: bool) -> None:
    """Also the wait for a message, which has no timeout."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ends = os.pidfd_open(process.pid)
        processes = [ends, -1] if is_message else [-1, ends]
        exchange = exchanges_of(2, processes=processes)[int(is_message)]
        with ThreadPoolExecutor(1) as threads:
            call = exchange.broadcast if is_message else exchange.sum
            waiting = threads.submit(call, torch.ones(3))
            process.kill()
            with pytest.raises(RuntimeError, match=r"the process of rank \d has ended"):
                waiting.result(timeout=_LONG_S)
        os.close(ends)


def test_what_does_not_fit_is_refused() -> None:
    exchange = exchanges_of(2)[0]
    with pytest.raises(RuntimeError, match="must be dense"):
        exchange.sum(torch.ones(3, 4).T)
    with pytest.raises(RuntimeError, match="no kernel for"):
        exchanges_of(1)[0].sum(torch.ones(3, dtype=torch.int64))
    sizes, few = ExchangeSizes(2, _SLOT_BYTES, 0), torch.zeros(99, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="two slots per rank"):
        Exchange(few, sizes, 0, [-1, -1], 1.0, Implementation.CPP_AVX2)
