"""Makes the config of a GGUF file's metadata.

transformers converts the keys that most models have. It drops others that change what a model
computes, and replaces missing keys by its own defaults. Here the config gets what the file says,
and llama.cpp's defaults. ModelError for what cannot be converted with certainty.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.gguf_file import ROTARY_FACTORS, GgufFile

# What transformers raises for files that it cannot convert.
CONVERSION_ERRORS: Final = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError),
    StrictDataclassError,
)
_INSTEAD: Final = (
    "take config.json and tokenizer.json from the model's original folder, and put the file beside "
    "them"
)
_WINDOW: Final = "attention.sliding_window"
_SCALING: Final = "rope.scaling.type"
_FREQ_BASE: Final = 10_000.0
# Layers of the 27B models. llama.cpp recognises them so, as their scale is not in the file.
_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
# Every n-th layer of these has no sliding window.
_WINDOW_PATTERNS: Final = {"gemma2": 2, "gemma3": 6}


def read_config(file: GgufFile) -> Any:
    """The config of transformers. ModelError if the metadata do not describe the model completely,
    or have what cannot be converted."""
    metadata = _Metadata(file)
    fields = _fields(metadata)
    try:
        config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
        for name, value in fields.items():
            setattr(config, name, value)
    except CONVERSION_ERRORS as error:
        raise ModelError(f"{file.path}: config cannot be read: {error}") from error
    config.sliding_window = _sliding_window(metadata, config.model_type)
    # Activations have this type; the file has none for them.
    config.dtype = config.dtype or "bfloat16"
    return config


@dataclass(frozen=True)
class _Metadata:
    """The metadata of a file's architecture, by keys without its name."""

    file: GgufFile

    def has(self, key: str) -> bool:
        return self._full(key) in self.file.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """None for lists, which are not read."""
        return self.file.metadata.get(self._full(key), default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer. ModelError for other values, or without value and default."""
        value = self._given(key, default)
        if type(value) is not int or value <= 0:
            raise self.error(key, value, "is not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. ModelError for other values, or without value and default."""
        value = self._given(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, value, "is not a positive number")
        return float(value)

    def expect(self, key: str, expected: Any) -> None:
        """ModelError if the key has another value than the model computes with."""
        if (value := self.get(key, expected)) != expected:
            raise self.error(key, value, "cannot be converted")

    def error(self, key: str, value: Any, reason: str) -> ModelError:
        found = "with a list" if value is None else value
        return ModelError(
            f"{self.file.path}: has {self._full(key)} {found}, which {reason}; {_INSTEAD}"
        )

    def _given(self, key: str, default: float | None) -> Any:
        if default is None and not self.has(key):
            raise ModelError(f"{self.file.path}: has no {self._full(key)}; {_INSTEAD}")
        return self.get(key, default)

    def _full(self, key: str) -> str:
        return f"{self.file.architecture}.{key}"


def _fields(metadata: _Metadata) -> dict[str, Any]:
    """Attributes of the config, all but the sliding window."""
    architecture = metadata.file.architecture
    hidden_size = metadata.count("embedding_length")
    num_heads = metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", hidden_size // num_heads)
    fields: dict[str, Any] = {
        "num_hidden_layers": metadata.count("block_count"),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(metadata),
    }
    if metadata.has("vocab_size"):
        fields["vocab_size"] = metadata.count("vocab_size")
    metadata.expect("attention.value_length", head_dim)
    metadata.expect("rope.dimension_count", head_dim)
    metadata.expect("attention.causal", True)
    metadata.expect("expert_count", 0)
    if architecture in _LAYERS_OF_27B:
        is_27b = fields["num_hidden_layers"] == _LAYERS_OF_27B[architecture]
        fields["query_pre_attn_scalar"] = hidden_size // num_heads if is_27b else head_dim
        metadata.expect(f"{_WINDOW}_pattern", _WINDOW_PATTERNS[architecture])
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if metadata.has(name):
                fields[name] = metadata.number(name)
    return fields


def _rope_parameters(metadata: _Metadata) -> dict[str, Any]:
    for tensor in metadata.file.tensors:
        if tensor.name in ROTARY_FACTORS:
            raise ModelError(
                f"{metadata.file.path}: has {tensor.name}, which cannot be converted; {_INSTEAD}"
            )
    metadata.expect("rope.scaling.attn_factor", 1.0)
    base = metadata.number("rope.freq_base", _FREQ_BASE)
    parameters: dict[str, Any] = {"rope_theta": base, **_scaling(metadata)}
    if metadata.file.architecture == "phi3":
        parameters["partial_rotary_factor"] = 1.0
    if metadata.file.architecture != "gemma3":
        metadata.expect("rope.freq_base_swa", base)
        return parameters
    # llama.cpp does not scale the positions of layers with a sliding window.
    sliding_base = metadata.number("rope.freq_base_swa", _FREQ_BASE)
    sliding = {"rope_theta": sliding_base, "rope_type": "default"}
    # Ollama's names of both, which llama.cpp does not read.
    metadata.expect("rope.global.freq_base", base)
    metadata.expect("rope.local.freq_base", sliding_base)
    return {"full_attention": parameters, "sliding_attention": sliding}


def _scaling(metadata: _Metadata) -> dict[str, Any]:
    """The type of rotary embeddings and the factor of positions. A factor without a type is linear,
    and 0 is none, as in llama.cpp."""
    unscaled = {"rope_type": "default"}
    kind = metadata.get(_SCALING, "linear")
    if kind == "none":
        return unscaled
    if kind != "linear":
        raise metadata.error(_SCALING, kind, "cannot be converted")
    # The second is the old name.
    key = "rope.scaling.factor" if metadata.has("rope.scaling.factor") else "rope.scale_linear"
    if metadata.get(key, 0) == 0 or (factor := metadata.number(key)) == 1:
        return unscaled
    if metadata.file.architecture == "phi3":
        raise metadata.error(key, factor, "transformers' model cannot have")
    return {"rope_type": "linear", "factor": factor}


def _sliding_window(metadata: _Metadata, model_type: str) -> int | None:
    """None without a window."""
    if model_type == "gemma3_text":
        return metadata.count(_WINDOW)
    if model_type == "gemma2":
        return metadata.count(_WINDOW, 4096)
    if metadata.get(_WINDOW, 0) == 0:
        return None
    window = metadata.count(_WINDOW)
    if model_type in ("mistral", "phi3"):
        return window
    if window < metadata.count("context_length"):
        raise metadata.error(_WINDOW, window, "cannot be converted")
    return None
