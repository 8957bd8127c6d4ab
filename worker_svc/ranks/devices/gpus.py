"""The GPU of each rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from worker_svc.errors import WrongSettingError
from worker_svc.gpu.gpu_lock import exclusive_lock, lock_file
from worker_svc.loading.devices import gpu_uuid
from worker_svc.ranks.agreement import GPU, raise_reported
from worker_svc.ranks.group import RankGroup
from worker_svc.service.process import local_rank, num_local_ranks


def gpu_index(rank: int, num_ranks: int, num_gpus: int) -> int:
    """Of the GPUs that this process sees: the rank's number among those of its host.
    WrongSettingError, with both numbers, if there are too few."""
    num_local, index = num_local_ranks(num_ranks), local_rank(rank, num_ranks)
    if num_local > num_gpus:
        raise WrongSettingError(
            f"--tensor-parallel-size: {num_local} ranks on this host need a GPU each, but torch "
            f"finds {num_gpus}; lower it, set --device=cpu, or check CUDA_VISIBLE_DEVICES"
        )
    if index >= num_gpus:
        raise WrongSettingError(
            f"LOCAL_RANK is {index}, but torch finds {num_gpus} GPUs; let each rank see all GPUs "
            "of its host, or check CUDA_VISIBLE_DEVICES"
        )
    return index


def take_device(device: torch.device, rank: int, num_ranks: int) -> torch.device:
    """The rank's device, which becomes the current one of this thread. WrongSettingError as in
    `gpu_index`."""
    if device.type != "cuda":
        return device
    index = gpu_index(rank, num_ranks, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def exclusive_gpu(group: RankGroup, device: torch.device, folder: Path | None) -> Iterator[None]:
    """`exclusive_lock` on this rank's GPU; a rank on a CPU has nothing to lock. Errors as in
    `exclusive_in_order`."""
    if device.type != "cuda":
        # Without waiting for the others, which load meanwhile.
        group.exchange_own(GPU, {"gpu": None})
        yield
        return
    gpu = gpu_uuid(device)
    with exclusive_in_order(group, gpu, lock_file(folder, gpu)):
        yield


@contextmanager
def exclusive_in_order(group: RankGroup, gpu: str, path: Path) -> Iterator[None]:
    """`exclusive_lock` of a file per GPU. All ranks of all workers lock their GPUs in one order:
    else two workers could each wait for a GPU of the other. WrongSettingError if two ranks have the
    same GPU or one has none; ModelError if another rank could not start."""
    every = group.exchange(GPU, {"gpu": gpu})
    raise_reported(every)
    gpus = _different([one["gpu"] for one in every], group.rank)
    before = sorted(gpus).index(gpu)
    for place in range(before):
        group.exchange(f"gpu locked {place}", True)
    with exclusive_lock(path):
        for place in range(before, group.size):
            group.exchange(f"gpu locked {place}", True)
        yield


def _different(gpus: Sequence[str | None], own_rank: int) -> list[str]:
    """Those of all ranks. WrongSettingError, on all ranks, unless each has one of its own."""
    found: list[str] = []
    for rank, gpu in enumerate(gpus):
        if gpu is None:
            raise WrongSettingError(
                f"ranks differ in --device: cuda on rank {own_rank}, cpu on rank {rank}"
            )
        if gpu in found:
            raise WrongSettingError(
                f"ranks {found.index(gpu)} and {rank} have the same GPU, {gpu}; let each rank see "
                "all GPUs of its host, or check LOCAL_RANK"
            )
        found.append(gpu)
    return found
