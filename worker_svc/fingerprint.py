"""A model's fingerprint: what prefix hashes are rooted in."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

_WHOLE_BELOW = 64 * 2**20
_SAMPLE_BYTES = 2**20
_NUM_SAMPLES = 32


def model_fingerprint(folder: Path, dtype: str, weights: tuple[Path, ...]) -> bytes:
    """SHA-256 over the canonical config.json, the dtype, and each weights file's name, size and
    content.

    A file of up to 64 MiB counts with its whole content; a larger one with its first megabyte,
    where safetensors keeps its header, and 32 evenly spaced samples of a megabyte, the last at its
    end.
    """
    config = json.loads((folder / "config.json").read_text())
    parts = [json.dumps(config, sort_keys=True, separators=(",", ":")).encode(), dtype.encode()]
    for path in sorted(weights):
        parts += [path.name.encode(), str(path.stat().st_size).encode(), _content(path)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _content(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start, length in _samples(path.stat().st_size):
            file.seek(start)
            digest.update(file.read(length))
    return digest.digest()


def _samples(size: int) -> Iterator[tuple[int, int]]:
    """The (start, length) pieces of a file that count."""
    if size <= _WHOLE_BELOW:
        yield 0, size
        return
    last = size - _SAMPLE_BYTES
    for i in range(_NUM_SAMPLES + 1):
        yield last * i // _NUM_SAMPLES, _SAMPLE_BYTES
