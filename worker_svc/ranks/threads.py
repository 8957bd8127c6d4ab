"""The threads and cores of a rank: ranks of one host share its cores."""

import os

import torch

from worker_svc.service.process import local_rank, num_local_ranks
from worker_svc.settings import WorkerSettings


def set_threads(settings: WorkerSettings) -> None:
    """Of torch's operations and of the kernels: this rank's share of the worker's."""
    if settings.num_ranks > 1:
        torch.set_num_threads(max(1, _total(settings) // num_local_ranks(settings.num_ranks)))
    elif settings.threads:
        torch.set_num_threads(settings.threads)


def keep_to_own_cores(settings: WorkerSettings, rank: int) -> None:
    """Confine the calling thread, and those that it starts, to this rank's share of the cores, if
    the worker has all of them.

    A message wakes a thread on the core of its sender, so without this two ranks would often begin
    a pass on one core, until the kernel moves one of them, some 20 ms later.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    num_local = num_local_ranks(settings.num_ranks)
    share = len(cores) // num_local
    if share and _total(settings) >= len(cores):
        first = local_rank(rank, settings.num_ranks) % num_local * share
        os.sched_setaffinity(0, cores[first : first + share])


def _total(settings: WorkerSettings) -> int:
    return settings.threads or torch.get_num_threads()
