"""The C++ kernels in this process, as `torch.ops.quire`."""

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
    """Whether `load_extension` finds the library as it is to be."""
    return complete_mark(build_folder()).exists()


@cache
def load_extension() -> bool:
    """Whether `torch.ops.quire` is there; compiles it if need be, which takes about a minute.

    Without a compiler, or where the sources do not compile, it warns once.
    """
    if not is_compiled():
        # In a process of its own: what compiling takes in memory does not stay in this one.
        built = subprocess.run(
            [sys.executable, "-m", "kernels.cpu.build"],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if built.returncode:
            output = "\n".join(built.stdout.splitlines()[-_LINES_OF_OUTPUT:])
            warnings.warn(f"no C++ kernels, so models run slowly: {output}", stacklevel=2)
            return False
    torch.ops.load_library(str(library_file(build_folder())))  # type: ignore[no-untyped-call]
    return True
