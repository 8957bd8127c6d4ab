"""The library of C++ kernels in its folder, one per content of sources, flags, version of torch and
kind of processor."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Final

import torch

NAME: Final = "quire_kernels"
# Without -march: the sources name the instruction sets of their functions.
COMPILER_FLAGS: Final = ("-O3", "-pthread", "-fvisibility=hidden", "-Wall")
LINKER_FLAGS: Final = ("-pthread",)
# Includes are relative to it.
SOURCE_FOLDER: Final = Path(__file__).parent

_CACHE_VARIABLE = "QUIRE_KERNEL_CACHE"


def sources(folder: Path = SOURCE_FOLDER) -> list[Path]:
    """The files to be compiled. No two have the same name, as torch names their objects by it."""
    return sorted(folder.rglob("*.cpp"))


def build_folder(source_folder: Path = SOURCE_FOLDER) -> Path:
    """The folder of this build, below `QUIRE_KERNEL_CACHE` or the user's cache."""
    fixed = (platform.machine(), torch.__version__, COMPILER_FLAGS, LINKER_FLAGS)
    digest = hashlib.sha256(repr(fixed).encode())
    for path in sorted([*sources(source_folder), *source_folder.rglob("*.h")]):
        name = path.relative_to(source_folder).as_posix()
        digest.update(f"\0{name}\0".encode() + path.read_bytes())
    cache = os.environ.get(_CACHE_VARIABLE) or Path.home() / ".cache" / "quire" / "kernels"
    return Path(cache) / digest.hexdigest()[:16]


def library_file(folder: Path) -> Path:
    return folder / f"{NAME}.so"


def complete_mark(folder: Path) -> Path:
    """The file that marks a library as completely linked."""
    return folder / "complete"
