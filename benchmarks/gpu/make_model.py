"""`python -m benchmarks.gpu.make_model FOLDER` writes Qwen3-0.6B with random weights."""

import sys
from itertools import islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

VOCAB_SIZE = 151_936


def make_model(folder: Path) -> None:
    """Write a bfloat16 model drawn from seed 0."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer()).save_pretrained(folder)


def _tokenizer() -> Tokenizer:
    """Build a byte-level tokenizer: all bytes, all pairs, and triples up to the vocabulary size."""
    single = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(single, single))
    joined = ["".join(pair) for pair in pairs]
    num_left = VOCAB_SIZE - len(single) - len(joined)
    triples = list(islice(product(joined, single), num_left))
    tokens = [*single, *joined, *("".join(triple) for triple in triples)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[*pairs, *triples]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
