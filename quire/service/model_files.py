"""The folder of a model on this machine, and patterns of the files that services read of a model,
for downloads from the hub."""

from pathlib import Path
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


def local_folder(model: str) -> Path | None:
    """The folder of this path, in which `~` is the user's home; None for what may be a hub id.
    ValueError for a file, and for a path that can be no hub id."""
    path = Path(model)
    try:
        path = path.expanduser()
    except RuntimeError:
        # The user after the `~` has no home.
        is_path = True
    else:
        is_path = path.is_absolute() or model.startswith(".")
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"{model}: is a file; give the folder that contains it")
    if is_path:
        raise ValueError(f"{model}: no such folder")
    return None
