"""Which GPU a rank has, and that no other worker loads on it. No GPU is needed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from rank_threads import rank_threads
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from worker_driver import worker_settings

from worker_svc.errors import WrongSettingError
from worker_svc.model.checkpoint import ModelError
from worker_svc.ranks import heartbeats, requirements
from worker_svc.ranks.agreement import report_failure
from worker_svc.ranks.devices.gpus import (
    exclusive_gpu,
    exclusive_in_order,
    gpu_index,
    take_device,
)
from worker_svc.ranks.heartbeats import send_heartbeats
from worker_svc.ranks.requirements import require_ranks

_FEW_S = 10.0


@pytest.mark.parametrize(
    ("rank", "variables", "index"),
    [
        (0, {}, 0),
        (3, {}, 3),
        # torchrun, on the second host of two.
        (5, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 1),
        # One process per host.
        (1, {"LOCAL_WORLD_SIZE": "1"}, 0),
    ],
)
def test_each_rank_has_a_gpu(
    rank: int, variables: dict[str, str], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert gpu_index(rank, 4, 4) == index


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, r"4 ranks on this host need a GPU each, but torch finds 2; .*--device=cpu"),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 3, but torch finds 2 GPUs"),
    ],
)
def test_too_few_gpus_are_refused_with_both_numbers(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WrongSettingError, match=words):
        gpu_index(0, 4, 2)


def test_ranks_on_cpus_take_no_gpu() -> None:
    device = torch.device("cpu")
    assert take_device(device, 3, 4) is device


def test_stages_on_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "is_nccl_available", lambda: True)
    device = torch.device("cuda")
    require_ranks(worker_settings(Path("model"), tensor_parallel_size=2), device)
    stages = worker_settings(Path("model"), pipeline_parallel_size=2)
    with pytest.raises(WrongSettingError, match="--pipeline-parallel-size"):
        require_ranks(stages, device)


def test_a_torch_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "is_nccl_available", lambda: False)
    settings = worker_settings(Path("model"), tensor_parallel_size=2)
    with pytest.raises(WrongSettingError, match="has no NCCL"):
        require_ranks(settings, torch.device("cuda"))
    require_ranks(settings, torch.device("cpu"))


def test_workers_with_the_same_gpus_load_one_after_another(tmp_path: Path) -> None:
    """Each would wait for a GPU of the other if ranks locked them in their own order."""
    workers: dict[str, list[str]] = {"first": ["a", "b"], "second": ["b", "a"]}
    inside: list[str] = []
    seen: SimpleQueue[int] = SimpleQueue()

    def load(worker: str, rank: int, groups: Any) -> None:
        gpu = workers[worker][rank]
        with exclusive_in_order(groups[rank], gpu, tmp_path / gpu):
            inside.append(worker)
            seen.put(len(set(inside)))
            groups[rank].exchange("loaded", True)
            inside.remove(worker)

    with rank_threads(2) as first, rank_threads(2) as second, ThreadPoolExecutor(4) as threads:
        ranks = {"first": first.groups, "second": second.groups}
        loading = [
            threads.submit(load, worker, rank, groups)
            for worker, groups in ranks.items()
            for rank in range(2)
        ]
        for each in loading:
            each.result(timeout=30)
    assert [seen.get() for _ in loading] == [1] * 4


def test_two_ranks_with_one_gpu_are_refused(tmp_path: Path) -> None:
    def load(rank: int) -> str:
        with (
            pytest.raises(WrongSettingError) as raised,
            exclusive_in_order(ranks.groups[rank], "a", tmp_path / "a"),
        ):
            pass
        return str(raised.value)

    with rank_threads(2) as ranks:
        reasons = ranks.run(load)
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith("ranks 0 and 1 have the same GPU, a;")


def test_ranks_on_a_gpu_and_on_a_cpu_are_refused(tmp_path: Path) -> None:
    def load(rank: int) -> None:
        group = ranks.groups[rank]
        if rank:
            with exclusive_gpu(group, torch.device("cpu"), tmp_path):
                return
        with (
            pytest.raises(WrongSettingError, match="--device: cuda on rank 0, cpu on rank 1"),
            exclusive_in_order(group, "a", tmp_path / "a"),
        ):
            pass

    with rank_threads(2) as ranks:
        ranks.run(load)


def test_a_rank_without_a_gpu_is_reported(tmp_path: Path) -> None:
    def load(rank: int) -> None:
        if rank:
            report_failure(ranks.groups[1], WrongSettingError("no GPU"))
            return
        with (
            pytest.raises(ModelError, match="rank 1: no GPU"),
            exclusive_in_order(ranks.groups[0], "a", tmp_path / "a"),
        ):
            pass

    with rank_threads(2) as ranks:
        ranks.run(load)


def test_a_follower_notices_that_rank_0_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_INTERVAL_S", "_STOP_S"):
        monkeypatch.setattr(heartbeats, name, 0.01)
    lost: SimpleQueue[str] = SimpleQueue()
    store: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    follower: Any = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
    send_heartbeats(follower, 1, lost.put)
    store.get("heartbeat/1")
    del store
    assert lost.get(timeout=_FEW_S).startswith("rank 0 is gone: ")
