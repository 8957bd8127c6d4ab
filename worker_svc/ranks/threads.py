"""The threads of a rank: ranks of one host share its cores."""

import os

import torch

from worker_svc.settings import WorkerSettings


def set_threads(settings: WorkerSettings) -> None:
    """Of torch's operations and of the kernels."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    elif settings.num_ranks > 1:
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", settings.num_ranks))
        torch.set_num_threads(max(1, torch.get_num_threads() // num_local))
