"""Loads the C++ kernels into this process, as `torch.ops.quire`."""

import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch

from kernels.cpu.library import build_folder, complete_mark, library_file

_ROOT = Path(__file__).resolve().parents[2]
_LINES_OF_OUTPUT = 20


def is_compiled() -> bool:
    """Whether an up-to-date library exists."""
    return complete_mark(_folder()).exists()


@cache
def _folder() -> Path:
    """That of this process's build: finding it reads all sources."""
    return build_folder()


@cache
def load_extension() -> bool:
    """Load `torch.ops.quire`, compiling it if necessary, which takes about a minute.

    Returns False, with a warning, if there is no compiler, the sources do not compile, or the
    library does not load, as one of a machine with newer system libraries.
    """
    if not is_compiled():
        # In another process, so that the memory for compiling is not kept by this one.
        built = subprocess.run(
            [sys.executable, "-m", "kernels.cpu.build"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
        )
        if built.returncode:
            # A build that crashed printed no reason; its traceback is on stderr.
            output = built.stdout.strip() or built.stderr.strip()
            return _failed("\n".join(output.splitlines()[-_LINES_OF_OUTPUT:]))
    try:
        torch.ops.load_library(str(library_file(_folder())))  # type: ignore[no-untyped-call]
    except OSError as error:
        return _failed(f"{error}; remove {_folder()} to compile them here")
    return True


def _failed(reason: str) -> bool:
    warnings.warn(f"no C++ kernels, so models run slowly: {reason}", stacklevel=3)
    return False
