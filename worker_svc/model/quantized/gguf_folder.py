"""Makes a model folder of a GGUF file, with the config and the tokenizer of its metadata:
`python -m worker_svc.model.quantized.gguf_folder model.gguf folder`.

Gateways and workers read such a folder like any other.
"""

import argparse
import os
import sys
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.gguf_file import ROTARY_FACTORS, GgufFile


def make_folder(path: Path, folder: Path) -> None:
    """Write `config.json`, the tokenizer and a link to the file. ModelError if the metadata do not
    describe the model completely, or if the tokenizer is of an unknown kind."""
    file = GgufFile.open(path)
    _check_rotary(file)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        # Activations have this type; the file has none for them.
        config.dtype = config.dtype or "bfloat16"
        if head_dim := file.metadata.get(f"{file.architecture}.attention.key_length"):
            config.head_dim = head_dim
        config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.save_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ModelError(f"{path}: config or tokenizer cannot be read: {error}") from error
    link = folder / path.name
    if not link.exists():
        os.symlink(path.resolve(), link)


def _check_rotary(file: GgufFile) -> None:
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type")
    factors = [tensor.name for tensor in file.tensors if tensor.name in ROTARY_FACTORS]
    if factors or kind not in (None, "none"):
        found = factors[0] if factors else f"rope.scaling.type {kind}"
        raise ModelError(
            f"{file.path}: has {found}, which cannot be converted; take config.json and "
            "tokenizer.json from the model's original folder, and put the file beside them"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="The GGUF file.")
    parser.add_argument("folder", type=Path, help="The folder that is made.")
    arguments = parser.parse_args()
    try:
        make_folder(arguments.file, arguments.folder)
    except ModelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
