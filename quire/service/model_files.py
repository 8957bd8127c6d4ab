"""Patterns of the files that services read of a model, for downloads from the hub."""

from typing import Final

_CONFIGS = ("config.json", "generation_config.json")
# Of a worker.
WEIGHTS_FILES: Final = (
    *("*.safetensors", "*.safetensors.index.json"),
    # How weights are quantised, in older checkpoints.
    *("quantize_config.json", "quant_config.json"),
    # For structured output.
    "tokenizer.json",
    *_CONFIGS,
)
# Of a gateway: tokenizer and chat template in any format, no weights.
TEXT_FILES: Final = (
    *("*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken"),
    *("vocab.txt", "merges.txt"),
)
