"""The files of a model: where they are, and the fingerprint that prefix hashes begin with."""

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from quire.service.model_files import local_folder
from worker_svc.model.download import download
from worker_svc.model.load_progress import LoadProgress

_WHOLE_BELOW = 64 * 2**20
_SAMPLE_BYTES = 2**20
_NUM_SAMPLES = 32
# By quantisation method, the file of checkpoints whose config.json does not mention it.
QUANTIZATION_FILES: Final = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
_ONE_FILE: Final = "model.safetensors"
_INDEX: Final = f"{_ONE_FILE}.index.json"


class ModelError(ValueError):
    """A model that cannot be found or served."""


def find_model(
    model: str, revision: str | None, files: list[str], progress: LoadProgress | None = None
) -> Path:
    """The local folder, else the hub's cache with the files that match. ModelError if the model is
    in neither."""
    try:
        if (folder := local_folder(model)) is not None:
            return folder
    except ValueError as error:
        raise ModelError(str(error)) from error
    try:
        count_bytes = partial((progress or LoadProgress()).count_bytes, "downloading")
        return download(model, revision, files, count_bytes)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{model}: no such folder, and not available from the hub: {error}"
        ) from error


def weights_files(folder: Path) -> tuple[Path, ...]:
    """The files with a model's weights: as transformers chooses, `model.safetensors` or those of
    the index, else all safetensors files of the folder, else its GGUF file. ModelError if there is
    none, if one of the index is missing, or if there are several GGUF files."""
    if (file := folder / _ONE_FILE).is_file():
        return (file,)
    if (index := folder / _INDEX).is_file():
        return _files_of(index)
    if files := tuple(sorted(folder.glob("*.safetensors"))):
        return files
    files = tuple(sorted(folder.glob("*.gguf")))
    if len(files) > 1:
        raise ModelError(f"{folder} has several *.gguf files: {', '.join(f.name for f in files)}")
    if not files:
        raise ModelError(f"{folder} has no *.safetensors file")
    return files


def _files_of(index: Path) -> tuple[Path, ...]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = tuple(index.parent / name for name in sorted(names))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: {error!r}") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{index} has weights in {missing[0]}, which is not there")
    if not files:
        raise ModelError(f"{index} has no weights")
    return files


def quantization_texts(folder: Path) -> Iterator[bytes]:
    """Names and contents of the files of `QUANTIZATION_FILES` that the folder has."""
    for name in QUANTIZATION_FILES.values():
        if (file := folder / name).is_file():
            yield from (name.encode(), file.read_bytes())


def rounding_name(quantization: str | None, int8_activations: bool) -> str | None:
    """What the settings round weights or inputs to, as a part of the fingerprint."""
    if int8_activations and quantization is None:
        return "int8 activations"
    return quantization


def model_fingerprint(
    folder: Path, dtype: str, weights: tuple[Path, ...], quantization: str | None = None
) -> bytes:
    """SHA-256 over the canonical config.json, the dtype, each weights file's name, size and
    content, how the checkpoint is quantised, and what the weights are rounded to.

    A file of up to 64 MiB is hashed whole; of a larger one the first megabyte, which contains the
    header of safetensors, and 32 evenly spaced samples of a megabyte, the last at its end.
    """
    config = json.loads((folder / "config.json").read_text())
    parts = [json.dumps(config, sort_keys=True, separators=(",", ":")).encode(), dtype.encode()]
    for path in sorted(weights):
        parts += [path.name.encode(), str(path.stat().st_size).encode(), _content(path)]
    parts += quantization_texts(folder)
    if quantization is not None:
        parts.append(f"quantization {quantization}".encode())
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
    """The (start, length) pieces of a file that are hashed."""
    if size <= _WHOLE_BELOW:
        yield 0, size
        return
    last = size - _SAMPLE_BYTES
    for i in range(_NUM_SAMPLES + 1):
        yield last * i // _NUM_SAMPLES, _SAMPLE_BYTES
