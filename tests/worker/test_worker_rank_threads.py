"""Which threads and cores a rank has."""

import os
from pathlib import Path

import pytest
import torch
from worker_driver import worker_settings

from worker_svc.ranks.rendezvous import Place, place_of
from worker_svc.ranks.threads import keep_to_own_cores, set_threads
from worker_svc.settings import WrongSettingError

_VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a.example", "MASTER_PORT": "29500"}


@pytest.fixture
def confined(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The cores that the calling thread was confined to, on a machine of four."""
    cores: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 6, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, found: cores.append(list(found)))
    return cores


@pytest.mark.parametrize(
    ("num_ranks", "rank", "expected"),
    [(2, 0, [2, 3]), (2, 1, [6, 7]), (4, 2, [6]), (3, 2, [6])],
)
def test_a_worker_with_all_cores_divides_them(
    confined: list[list[int]], num_ranks: int, rank: int, expected: list[int]
) -> None:
    settings = worker_settings(Path("m"), tensor_parallel_size=num_ranks, threads=4)
    keep_to_own_cores(settings, rank)
    assert confined == [expected]


@pytest.mark.parametrize(("num_ranks", "threads"), [(2, 2), (8, 4)])
def test_a_worker_with_some_cores_leaves_them_to_the_kernel(
    confined: list[list[int]], num_ranks: int, threads: int
) -> None:
    settings = worker_settings(Path("m"), tensor_parallel_size=num_ranks, threads=threads)
    keep_to_own_cores(settings, 1)
    assert confined == []


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 4), (2, 2), (8, 1)])
def test_ranks_share_threads(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, expected: int
) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    set_threads(worker_settings(Path("m"), tensor_parallel_size=num_ranks, threads=4))
    assert found == [expected]


def test_finds_its_place_by_the_variables_of_torchrun() -> None:
    settings = worker_settings(Path("m"), tensor_parallel_size=2)
    assert place_of(_VARIABLES, settings) == Place(1, 2, "a.example", 29500)
    assert place_of({}, settings) is None


def test_refuses_incomplete_variables() -> None:
    settings = worker_settings(Path("m"), tensor_parallel_size=2)
    given = {name: value for name, value in _VARIABLES.items() if name != "MASTER_ADDR"}
    with pytest.raises(WrongSettingError, match="RANK is set, but not MASTER_ADDR"):
        place_of(given, settings)
