"""Settings that ranks need or exclude."""

from typing import Final

import torch
from torch.distributed import is_nccl_available

from worker_svc.errors import WrongSettingError
from worker_svc.settings import WorkerSettings

_TENSOR: Final = "--tensor-parallel-size / QUIRE_WORKER_TENSOR_PARALLEL_SIZE"
_PIPELINE: Final = "--pipeline-parallel-size / QUIRE_WORKER_PIPELINE_PARALLEL_SIZE"


def require_ranks(settings: WorkerSettings, device: torch.device) -> None:
    """WrongSettingError if the worker cannot have the ranks that the settings ask for."""
    if settings.num_ranks == 1:
        return
    size, name = settings.tensor_parallel_size, _TENSOR
    if size == 1:
        size, name = settings.pipeline_parallel_size, _PIPELINE
    if device.type != "cpu" and settings.pipeline_parallel_size > 1:
        raise WrongSettingError(
            f"{_PIPELINE}: {settings.pipeline_parallel_size}, but stages on GPUs are not "
            "supported; set --device=cpu or leave it at 1"
        )
    if device.type == "cuda" and not is_nccl_available():
        raise WrongSettingError(
            f"{name}: {size}, but torch {torch.__version__} has no NCCL, by which GPUs exchange "
            "tensors; set --device=cpu or install another build of torch"
        )
    if settings.enable_torch_compile:
        raise WrongSettingError(
            f"{name}: {size}, which --enable-torch-compile does not support; leave one out"
        )
