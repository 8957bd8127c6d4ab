"""A tokenizer for models of random weights: one word per token id, `t0 t1 t2 ...`."""

from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Add the tokenizer's files to a model's folder; no id ends a sequence."""
    words = {f"t{token_id}": token_id for token_id in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
