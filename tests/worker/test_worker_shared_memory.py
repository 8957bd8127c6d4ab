"""Exchanges of ranks that share memory: chosen where all can open it, and ended by the end of a
rank's process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rank_threads import rank_threads
from torch.distributed import HashStore, ProcessGroupGloo, TCPStore

from kernels.exchange import Exchange
from worker_svc.ranks import shared_memory
from worker_svc.ranks.group import RankGroup

_LOOPBACK = "127.0.0.1"
_ADD = f"""
import sys
import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from worker_svc.ranks.group import RankGroup

store = TCPStore("{_LOOPBACK}", int(sys.argv[1]), None, is_master=False)
group = RankGroup(store, 1, 2, ProcessGroupGloo.create_device(hostname="{_LOOPBACK}"))
group.connect()
print(group.shared is not None, flush=True)
while True:
    group.sum(torch.ones(1000))
"""


def add_forever(group: RankGroup) -> None:
    while True:
        group.sum(torch.ones(1000))


def test_a_killed_rank_ends_a_sum() -> None:
    lost: list[str] = []
    store = TCPStore(_LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    device = ProcessGroupGloo.create_device(hostname=_LOOPBACK)
    group = RankGroup(store, 0, 2, device, on_lost=lost.append)
    command = [sys.executable, "-c", _ADD, str(store.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        group.connect()
        assert other.stdout is not None
        # Between lines of the log.
        assert next(line for line in other.stdout if line in ("True\n", "False\n")) == "True\n"
        for _ in range(100):
            assert group.sum(torch.ones(1000))[-1] == 2.0
        # Without that, `sum` ends by its timeout.
        other.send_signal(signal.SIGKILL)
        with pytest.raises(RuntimeError):
            add_forever(group)
    assert "the process of rank 1 has ended" in lost[0]


def agreeing(num_ranks: int) -> Callable[[int], shared_memory.Agree]:
    store = HashStore()
    return lambda rank: RankGroup(store, rank, num_ranks).exchange


def shared_by(num_ranks: int) -> list[Exchange | None]:
    agree = agreeing(num_ranks)
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(
            threads.map(
                lambda rank: shared_memory.share_memory(rank, num_ranks, agree(rank), 60.0),
                range(num_ranks),
            )
        )


def test_ranks_of_one_host_share_memory() -> None:
    assert None not in shared_by(3)


@pytest.mark.parametrize("what", ["_create", "_open"])
def test_all_ranks_use_gloo_if_one_cannot_open_the_memory(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    # As on a system without such memory, and on another host.
    monkeypatch.setattr(shared_memory, what, lambda *_: None)
    assert shared_by(2) == [None, None]


def test_ranks_whose_kernels_do_not_load_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a library is there."""
    monkeypatch.setattr(shared_memory, "is_compiled", lambda: True)
    monkeypatch.setattr(shared_memory, "cpp_implementations", lambda: ())
    assert shared_by(2) == [None, None]


@pytest.mark.parametrize("what", ["memfd_create", "ftruncate"])
def test_memory_that_is_refused_is_not_used(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(what)

    monkeypatch.setattr(os, what, refuse)
    assert shared_by(2) == [None, None]


def test_other_memory_of_the_same_name_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a rank 0 on another host, with the same process and file descriptor."""
    open_own, num_opened = shared_memory._open, 0

    def open_another(owner: int, number: int, num_bytes: int) -> Any:
        nonlocal num_opened
        num_opened += 1
        if num_opened == 1:
            return open_own(owner, number, num_bytes)
        descriptor = shared_memory._create(num_bytes)
        assert descriptor is not None
        return open_own(owner, descriptor, num_bytes)

    monkeypatch.setattr(shared_memory, "_open", open_another)
    assert shared_by(2) == [None, None]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gloo_gives_what_shared_memory_gives(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    def outputs() -> list[Any]:
        with rank_threads(num_ranks) as ranks:

            def run(rank: int) -> Any:
                group = ranks.groups[rank]
                message = torch.full((5000,), float(rank == 0))
                group.broadcast([message[:7], message[7:]])
                total = group.sum(torch.full((3, 4), rank + 0.5))
                return group.shared is None, message.tolist(), total.tolist()

            return list(ranks.run(run))

    shared = outputs()
    monkeypatch.setattr(shared_memory, "_create", lambda _: None)
    by_gloo = outputs()
    assert [one[0] for one in (*shared, *by_gloo)] == [False] * num_ranks + [True] * num_ranks
    assert [one[1:] for one in shared] == [one[1:] for one in by_gloo]
