"""Makes a model folder of a GGUF file, with the config and the tokenizer of its metadata:
`python -m worker_svc.model.quantized.gguf_folder model.gguf folder`.

Gateways and workers read such a folder like any other.
"""

import argparse
import os
import sys
from pathlib import Path

from transformers import AutoTokenizer

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.gguf_config import CONVERSION_ERRORS, read_config
from worker_svc.model.quantized.gguf_file import GgufFile
from worker_svc.model.quantized.gguf_tokens import set_special_ids


def make_folder(path: Path, folder: Path) -> None:
    """Write `config.json`, the tokenizer and a link to the file. ModelError if the metadata do not
    describe the model completely, or if the tokenizer is of an unknown kind."""
    file = GgufFile.open(path)
    config = read_config(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        set_special_ids(config, file, tokenizer.get_vocab())
    except CONVERSION_ERRORS as error:
        raise ModelError(f"{path}: tokenizer cannot be read: {error}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # First, so that a refusal changes nothing.
        _link(path.resolve(), folder / path.name)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except CONVERSION_ERRORS as error:
        raise ModelError(f"{folder}: cannot be written: {error}") from error


def _link(file: Path, link: Path) -> None:
    """Make a link, in place of one to another file or to none. FileExistsError for a file."""
    if link.exists() and link.samefile(file):
        return
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise FileExistsError(f"{link.name} is another file than {file}; move one of them")
    os.symlink(file, link)


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
