"""`python -m benchmarks.engines.make_model NAME FOLDER` writes a model in Hugging Face format."""

import sys
from dataclasses import asdict
from itertools import chain, islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from benchmarks.engines.models import SHAPES, Shape

_NOT_THE_CONFIG = {"name", "request_rate", "kv_cache_mib"}


def make_model(model: Shape, folder: Path) -> None:
    geometry = {k: v for k, v in asdict(model).items() if k not in _NOT_THE_CONFIG}
    torch.manual_seed(0)
    config = Qwen3Config(**geometry, tie_word_embeddings=True)
    dtype = getattr(torch, model.dtype)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer(model.vocab_size)).save_pretrained(folder)


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Build a byte-level tokenizer: all bytes, then pairs and triples up to the vocabulary size."""
    single = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["".join(pair) for pair in product(single, single)]
    merges = list(
        islice(chain(product(single, single), product(pairs, single)), vocab_size - len(single))
    )
    tokens = [*single, *("".join(pair) for pair in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    make_model(SHAPES[sys.argv[1]], Path(sys.argv[2]))
