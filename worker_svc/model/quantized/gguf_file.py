"""Reads the tensors of GGUF files, by the package `gguf` and transformers' tables of names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from kernels.quantized import QuantizedWeight
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import StoredWeight
from worker_svc.model.quantized.gguf_blocks import BLOCK_KINDS, weight_of

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Whose tensors transformers' tables describe completely.
ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
# The config of transformers' model has them.
ROTARY_FACTORS: Final = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)


@dataclass(frozen=True)
class GgufFile:
    """A file whose metadata were read."""

    path: Path
    reader: Any  # a GGUFReader

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """ModelError if the file cannot be read, or needs what is not installed."""
        if find_spec("gguf") is None:
            raise ModelError(f"{path}: GGUF files need the package gguf: pip install 'quire[gguf]'")
        try:
            # Copy on write: torch warns of memory that cannot be written.
            file = cls(path, import_module("gguf").GGUFReader(path, "c"))
        except (OSError, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: not a complete GGUF file: {error}") from error
        if file.value("split.count") not in (None, 0, 1):
            raise ModelError(f"{path}: one of several parts; merge them by llama-gguf-split")
        if file.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {file.architecture}; served are {', '.join(ARCHITECTURES)}"
            )
        return file

    @property
    def architecture(self) -> str:
        return str(self.value("general.architecture"))

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.reader.tensors)

    def value(self, key: str) -> Any:
        """Of the metadata; None if there is none."""
        found = self.reader.get_field(key)
        return None if found is None else found.contents()


def find_tensors(
    file: GgufFile, network_class: Any, config: Any
) -> tuple[Mapping[str, Tensor], Mapping[str, StoredWeight]]:
    """The plain tensors by name, and the quantised weights by layer, under transformers' names.
    ModelError for types that are not served."""
    text_config = config.get_text_config()
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(text_config.to_dict())
    with torch.device("meta"):
        network = network_class(config)
    names = get_gguf_hf_weights_map(
        network, processor, file.architecture, text_config.num_hidden_layers
    )
    plain, quantized = {}, {}
    for tensor in file.reader.tensors:
        if tensor.name in ROTARY_FACTORS:
            continue
        if tensor.name not in names:
            raise ModelError(f"{file.path}: {network_class.__name__} has no tensor {tensor.name}")
        name, kind = names[tensor.name], tensor.tensor_type.name
        if kind in _DTYPES:
            plain[name] = _plain(tensor, processor)
        elif kind in BLOCK_KINDS and len(tensor.shape) == 2 and name.endswith(".weight"):
            # The file has the number of inputs first.
            shape = (int(tensor.shape[1]), int(tensor.shape[0]))
            read = partial(_read, tensor, processor)
            quantized[name.removesuffix(".weight")] = StoredWeight(shape, (tensor.name,), read)
        else:
            served = ", ".join((*_DTYPES, *BLOCK_KINDS))
            raise ModelError(f"{file.path}: {tensor.name} is {kind}; served are {served}")
    return plain, quantized


def _plain(tensor: Any, processor: Any) -> Tensor:
    """A tensor in its own type, as transformers' model has it."""
    dtype = _DTYPES[tensor.tensor_type.name]
    raw = torch.from_numpy(np.ascontiguousarray(tensor.data).view(np.uint8))
    shape = [int(size) for size in reversed(tensor.shape)]
    plain = raw.flatten().view(dtype).view(shape)
    process = partial(processor.process, name=tensor.name)
    if dtype == torch.bfloat16:
        # numpy has no such type.
        return torch.from_numpy(process(plain.float().numpy()).weights).to(dtype)
    return torch.from_numpy(process(plain.numpy()).weights)


def _read(tensor: Any, processor: Any) -> QuantizedWeight:
    weight = weight_of(torch.from_numpy(tensor.data), tensor.tensor_type.name)
    rows = _row_order(processor.process, weight.num_outputs, tensor.name)
    return weight if rows is None else weight.selected(rows)


def _row_order(process: Callable[..., Any], num_rows: int, name: str) -> Tensor | None:
    """The order into which transformers brings the rows of a tensor; None if it keeps them."""
    before = np.arange(num_rows)
    after = process(before, name=name).weights
    if np.array_equal(before, after):
        return None
    if not np.array_equal(before, np.sort(after)):
        raise ModelError(f"{name}: transformers does not only reorder rows")
    return torch.from_numpy(after.copy())
