"""Which threads and cores a rank has."""

import os
from pathlib import Path

import pytest
import torch
from worker_driver import worker_settings

from worker_svc.errors import WrongSettingError
from worker_svc.ranks.rendezvous import Place, place_of
from worker_svc.ranks.threads import keep_to_own_cores, set_threads

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


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "one", "RANK is 'one'; set it to a number"),
        ("MASTER_PORT", "", "MASTER_PORT is ''; set it to a number"),
        ("MASTER_PORT", "70000", "MASTER_PORT is 70000; set it to a number from 1 to 65535"),
        ("RANK", "2", "RANK is 2, but WORLD_SIZE is 2; number the ranks from 0 to 1"),
        ("RANK", "-1", "RANK is -1, but"),
    ],
)
def test_refuses_variables_that_cannot_be(name: str, value: str, words: str) -> None:
    settings = worker_settings(Path("m"), tensor_parallel_size=2)
    with pytest.raises(WrongSettingError, match=words):
        place_of({**_VARIABLES, name: value}, settings)


def test_ranks_that_torchrun_starts_again_read_nothing_of_those_before() -> None:
    """Its agent keeps the store."""
    agent = Place(0, 2, "127.0.0.1", 0).listen()
    of_torchrun = {
        **_VARIABLES,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    settings = worker_settings(Path("m"), tensor_parallel_size=2)
    first, same, again = (
        place_of({**of_torchrun, "TORCHELASTIC_RESTART_COUNT": count}, settings)
        for count in ("0", "0", "1")
    )
    assert first is not None
    assert same is not None
    assert again is not None
    first.store(is_server=True).set("model/1", "of the first start")
    assert same.store().check(["model/1"])
    assert not again.store().check(["model/1"])


def test_refuses_a_port_that_is_in_use() -> None:
    taken = Place(0, 2, "127.0.0.1", 0).listen()
    with pytest.raises(WrongSettingError, match=f"127.0.0.1:{taken.port} cannot be .* free port"):
        Place(0, 2, "127.0.0.1", taken.port).store(is_server=True)
