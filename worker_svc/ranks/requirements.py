"""Settings that ranks need or exclude."""

from typing import Final

import torch

from worker_svc.settings import WorkerSettings, WrongSettingError

_TENSOR: Final = "--tensor-parallel-size / QUIRE_WORKER_TENSOR_PARALLEL_SIZE"
_PIPELINE: Final = "--pipeline-parallel-size / QUIRE_WORKER_PIPELINE_PARALLEL_SIZE"


def require_ranks(settings: WorkerSettings, device: torch.device) -> None:
    """WrongSettingError if the worker cannot have the ranks that the settings ask for."""
    if settings.num_ranks == 1:
        return
    size, name = settings.tensor_parallel_size, _TENSOR
    if size == 1:
        size, name = settings.pipeline_parallel_size, _PIPELINE
    if device.type != "cpu":
        raise WrongSettingError(
            f"{name}: {size}, but ranks on GPUs (NCCL) are not supported; set --device=cpu or "
            "leave it at 1, with a worker per GPU"
        )
    if settings.enable_torch_compile:
        raise WrongSettingError(
            f"{name}: {size}, which --enable-torch-compile does not support; leave one out"
        )
