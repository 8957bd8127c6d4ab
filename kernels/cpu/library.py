"""Where the library of C++ kernels lies: a folder per content of its sources, torch and flags."""

import hashlib
import os
from pathlib import Path
from typing import Final

import torch

NAME: Final = "quire_kernels"
# Instruction sets beyond the processor family's first are asked for within the sources, function by
# function.
COMPILER_FLAGS: Final = ("-O3", "-pthread", "-fvisibility=hidden", "-Wall")
LINKER_FLAGS: Final = ("-pthread",)

_HERE = Path(__file__).parent
_CACHE_VARIABLE = "QUIRE_KERNEL_CACHE"


def sources() -> list[Path]:
    """What is compiled; what it includes lies beside it."""
    return sorted(_HERE.glob("*.cpp"))


def build_folder() -> Path:
    """The folder that this build belongs in, below `QUIRE_KERNEL_CACHE` or the user's cache."""
    digest = hashlib.sha256(repr((torch.__version__, COMPILER_FLAGS, LINKER_FLAGS)).encode())
    for path in sorted([*sources(), *_HERE.glob("*.h")]):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    cache = os.environ.get(_CACHE_VARIABLE) or Path.home() / ".cache" / "quire" / "kernels"
    return Path(cache) / digest.hexdigest()[:16]


def library_file(folder: Path) -> Path:
    return folder / f"{NAME}.so"


def complete_mark(folder: Path) -> Path:
    """Stands only beside a library that was linked to its end."""
    return folder / "complete"
