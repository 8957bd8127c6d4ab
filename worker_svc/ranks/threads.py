"""The threads of a rank: ranks of one host share its cores."""

import os

import torch

from worker_svc.settings import WorkerSettings


def set_threads(settings: WorkerSettings) -> None:
    """Of torch's operations and of the kernels: this rank's share of the worker's."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", settings.num_ranks))
    if settings.num_ranks > 1:
        total = settings.threads or torch.get_num_threads()
        torch.set_num_threads(max(1, total // num_local))
    elif settings.threads:
        torch.set_num_threads(settings.threads)
