"""A byte-level vocabulary of a size that current models have, trained on this machine's texts."""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

_CORPUS_BYTES = 80_000_000
_SUFFIXES = (".py", ".md", ".txt", ".rst", ".json", ".h", ".pyi")


def train(size: int, path: Path) -> None:
    """Write a tokenizer of `size` tokens, or of as many as the texts give."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def _texts() -> Iterator[str]:
    """The texts of the interpreter's library and packages, up to _CORPUS_BYTES."""
    left = _CORPUS_BYTES
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "include")]
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        if path.suffix in _SUFFIXES and path.is_file() and left > 0:
            text = path.read_text(encoding="utf-8", errors="ignore")[:2_000_000]
            left -= len(text)
            yield text


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]))
