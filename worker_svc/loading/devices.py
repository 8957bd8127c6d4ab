"""The device that a worker's model runs on."""

import torch

from worker_svc.errors import WrongSettingError


def find_device(device: str) -> torch.device:
    """The device of a setting; `auto` selects a GPU if there is one. WrongSettingError if there is
    no GPU for `cuda`."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise WrongSettingError(
            f"--device: cuda, but torch {torch.__version__} finds no GPU; set auto or cpu, or "
            "check the driver and the devices of the container"
        )
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    return torch.device(device)


def gpu_uuid(device: torch.device) -> str:
    """Of a GPU, whatever its index in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)
