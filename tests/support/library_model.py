"""The tiny model that libraries of quantisation are given, and what they calibrate with.

The programs beside this module import it in the environments of these libraries, so it depends on
torch, transformers and tokenizers alone, of old versions, too.
"""

import json
from pathlib import Path

import torch
from tiny_tokenizer import save_tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT = [5, 17, 99, 3, 42, 8, 61, 7, 7, 23]
_VOCAB_SIZE = 128
_CALIBRATION = (32, 64)  # texts, tokens of each


def write_model(folder: Path) -> None:
    """A random model in float16, with its tokenizer. AutoAWQ wants multiples of 64 outputs."""
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).half()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder, _VOCAB_SIZE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "pad_token": "t1",
        "eos_token": "t2",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def calibration_texts() -> list[list[int]]:
    """Random tokens."""
    torch.manual_seed(1)
    texts: list[list[int]] = torch.randint(_VOCAB_SIZE, _CALIBRATION).tolist()
    return texts
