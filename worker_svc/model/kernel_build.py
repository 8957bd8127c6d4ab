"""Announces that kernels are compiled, which delays a start."""

import torch

from kernels.cpu.extension import is_compiled
from worker_svc.model.load_progress import LoadProgress


def announce_compilation(setting: str, device: torch.device, progress: LoadProgress) -> None:
    """To be called before kernels are chosen. `setting` is that of the kernels."""
    wants_cpp = setting == "auto" or setting.startswith("cpp")
    if wants_cpp and device.type == "cpu" and not is_compiled():
        progress.begin("compiling kernels, which takes about a minute")
