"""Recognises the format of a quantised checkpoint."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from worker_svc.model.checkpoint import QUANTIZATION_FILES, ModelError
from worker_svc.model.quantized import awq, compressed_tensors, gptq
from worker_svc.model.quantized.checkpoint_tensors import (
    CheckpointTensors,
    StoredModel,
    StoredWeight,
)
from worker_svc.model.quantized.config_fields import as_object
from worker_svc.model.quantized.gguf_file import GgufFile, find_tensors
from worker_svc.model.quantized.layer_classes import (
    LayerClasses,
    layer_classes,
    refuse_joined_experts,
)

_COMPRESSED_TENSORS: Final = "compressed-tensors"
_READERS: Final = {
    "gptq": gptq.find_weights,
    "awq": awq.find_weights,
}
_SERVED: Final = (_COMPRESSED_TENSORS, *_READERS)
GGUF: Final = "gguf"
# transformers converts these weights to 16 bits itself, with this package.
_CONVERTED: Final = {"mxfp4": "accelerate"}


def quantization_of(config: Any, weights: tuple[Path, ...]) -> Mapping[str, Any] | None:
    """The `quantization_config` of a model, with its `quant_method`, which is GGUF for such a file;
    None if transformers loads the weights as they are. ModelError if the method is not served."""
    if weights[0].suffix == ".gguf":
        return {"quant_method": GGUF}
    for level in (config, config.get_text_config()):
        found = getattr(level, "quantization_config", None)
        if found is not None:
            to_dict = getattr(found, "to_dict", None)
            return _served(as_object("quantization_config", to_dict() if to_dict else found))
    for method, name in QUANTIZATION_FILES.items():
        if (path := weights[0].parent / name).is_file():
            return _served({**_read_json(path), "quant_method": method})
    return None


def open_checkpoint(
    quantization: Mapping[str, Any] | None,
    network_class: Any,
    config: Any,
    weights: tuple[Path, ...],
) -> StoredModel:
    """What the files have, `quantization` being that of `quantization_of`. ModelError if a weight
    cannot be served."""
    if quantization is not None and quantization["quant_method"] == GGUF:
        return find_tensors(GgufFile.open(weights[0]), network_class, config)
    tensors = CheckpointTensors(weights)
    quantized: Mapping[str, StoredWeight] = {}
    if quantization is not None:
        is_compressed = quantization["quant_method"] == _COMPRESSED_TENSORS
        classes = layer_classes(network_class, config) if is_compressed else LayerClasses()
        quantized = find_weights(quantization, tensors, classes)
        refuse_joined_experts(quantized, network_class, config)
    elsewhere = {name for weight in quantized.values() for name in weight.names}
    plain = {name: tensors.slice(name) for name in sorted(tensors.names - elsewhere)}
    return StoredModel(plain, quantized)


def find_weights(
    quantization: Mapping[str, Any], tensors: CheckpointTensors, classes: LayerClasses
) -> Mapping[str, StoredWeight]:
    """The quantised weights of a checkpoint by layer. Only compressed-tensors has schemes by
    `classes`. ModelError if a weight cannot be served, or if there are none."""
    method = quantization["quant_method"]
    if method == _COMPRESSED_TENSORS:
        weights = compressed_tensors.find_weights(quantization, tensors, classes)
    else:
        weights = _READERS[method](quantization, tensors)
    if not weights:
        raise ModelError(f"the config has quant_method {method}, but no tensor is quantised")
    return weights


def _served(quantization: Mapping[str, Any]) -> Mapping[str, Any] | None:
    method = quantization.get("quant_method")
    if package := _CONVERTED.get(str(method)):
        if find_spec(package) is None:
            raise ModelError(
                f"weights quantised by {method} need the package {package}, which is not installed"
            )
        return None
    if method not in _SERVED:
        raise ModelError(
            f"weights quantised by {method} are not served; served are {', '.join(_SERVED)}"
        )
    return quantization


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    return as_object(path.name, value)
