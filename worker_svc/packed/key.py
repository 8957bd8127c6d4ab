"""The key of a packed model: everything that its weights are a function of."""

import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from kernels.cpu.library import build_folder
from worker_svc.model.checkpoint import quantization_texts
from worker_svc.settings import WorkerSettings

_FORMAT: Final = "1"
_PACKAGES: Final = ("torch", "transformers", "numpy")
# The code in Python that chooses, rounds and packs weights; that in C++ has its own digest.
_CODE: Final = ("kernels", "worker_svc/loading", "worker_svc/model", "worker_svc/packed")
_ROOT: Final = Path(__file__).resolve().parents[2]
# Settings that change the weights, or the tables beside them.
_SETTINGS: Final = ("dtype", "quantization", "int8_activations", "max_model_len")


def packed_model_key(
    folder: Path, weights: Sequence[Path], settings: WorkerSettings, implementation: str
) -> str:
    """Hexadecimal digits that change with the checkpoint, the settings, the instruction set, and
    the code.

    The checkpoint counts by its configurations and by names, sizes and times of its weights' files.
    The time of the last change of an inode is among them, which no program can set, so a file that
    was replaced is noticed also if its time of modification was kept.
    """
    digest = hashlib.sha256()
    parts = [
        _FORMAT,
        *(f"{name} {version(name)}" for name in _PACKAGES),
        # Of the sources in C++, their flags and torch's version: the layout of panels.
        build_folder().name,
        *_code(),
        implementation,
        *(f"{name} {getattr(settings, name)}" for name in _SETTINGS),
        (folder / "config.json").read_text(),
        *(_identity(path) for path in sorted(weights)),
    ]
    for encoded in (*map(str.encode, parts), *quantization_texts(folder)):
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:32]


def _code() -> Iterator[str]:
    for folder in _CODE:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            yield f"{path.relative_to(_ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _identity(path: Path) -> str:
    found = path.stat()
    return f"{path.name} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
