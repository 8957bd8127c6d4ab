"""Makes a model folder of a GGUF file for the services of a local stack."""

import subprocess
import sys
from pathlib import Path
from typing import Final

from quire.launcher.errors import LaunchError

_MAKE_FOLDER: Final = "worker_svc.model.quantized.gguf_folder"


def model_folder(model: str, directory: Path) -> str:
    """The model if it is not a GGUF file, else a folder of it in `directory`. LaunchError with the
    reason if the file cannot be served."""
    if not model.endswith(".gguf"):
        return model
    folder = directory / "model"
    # In a process of its own: it imports torch.
    command = [sys.executable, "-m", _MAKE_FOLDER, model, str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        reason = made.stderr.strip().splitlines()[-1:] or [f"exit status {made.returncode}"]
        raise LaunchError(reason[0])
    return str(folder)
