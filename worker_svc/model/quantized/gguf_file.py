"""Reads the tensors of GGUF files under the names that transformers has for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from kernels.quantized import QuantizedWeight
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import StoredModel, StoredTensor, StoredWeight
from worker_svc.model.quantized.gguf_blocks import BLOCK_KINDS, weight_of
from worker_svc.model.quantized.gguf_header import GgufTensor, read_header

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
    """A file whose header was read."""

    path: Path
    metadata: Mapping[str, Any]  # without lists
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def open(cls, path: Path) -> Self:
        """ModelError if the file cannot be read or served, or needs what is not installed."""
        if find_spec("gguf") is None:
            raise ModelError(f"{path}: GGUF files need the package gguf: pip install 'quire[gguf]'")
        try:
            file = cls(path, *read_header(path))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: not a complete GGUF file: {error}") from error
        num_parts = file.metadata.get("split.count", 1)
        if type(num_parts) is not int:
            raise ModelError(f"{path}: split.count is {num_parts!r}, which is not an integer")
        if num_parts > 1:
            raise ModelError(f"{path}: one of several parts; merge them by llama-gguf-split")
        if file.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {file.architecture}; served are {', '.join(ARCHITECTURES)}"
            )
        return file

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


@dataclass(frozen=True)
class _PlainTensor:
    """A `StoredTensor`. All of it is converted, whatever is read."""

    tensor: GgufTensor
    processor: Any

    def get_shape(self) -> Sequence[int]:
        return self.tensor.shape

    def get_dtype(self) -> str:
        return self.tensor.kind

    def __getitem__(self, index: Any) -> Tensor:
        return plain_tensor(self.tensor, self.processor)[index]


def find_tensors(file: GgufFile, network_class: Any, config: Any) -> StoredModel:
    """The tensors under transformers' names. ModelError for types that are not served."""
    text_config = config.get_text_config()
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(text_config.to_dict())
    names = parameter_names(file.architecture, network_class, config)
    plain: dict[str, StoredTensor] = {}
    quantized = {}
    for tensor in file.tensors:
        if tensor.name in ROTARY_FACTORS:
            continue
        if tensor.name not in names:
            raise ModelError(f"{file.path}: {network_class.__name__} has no tensor {tensor.name}")
        name = names[tensor.name]
        if tensor.kind in _DTYPES:
            plain[name] = _PlainTensor(tensor, processor)
        elif tensor.kind in BLOCK_KINDS and len(tensor.shape) == 2 and name.endswith(".weight"):
            read = partial(_read, tensor, processor)
            shape, num_bytes = (tensor.shape[0], tensor.shape[1]), tensor.data.nbytes
            stored = StoredWeight(shape, (tensor.name,), num_bytes, read)
            quantized[name.removesuffix(".weight")] = stored
        else:
            served = ", ".join((*_DTYPES, *BLOCK_KINDS))
            raise ModelError(f"{file.path}: {tensor.name} is {tensor.kind}; served are {served}")
    return StoredModel(plain, quantized)


def parameter_names(architecture: str, network_class: Any, config: Any) -> Mapping[str, str]:
    """transformers' names of parameters by those of files. transformers has the same function, but
    it looks each name up once for every module that contains it."""
    gguf = import_module("gguf")
    [number] = [n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    known = gguf.get_tensor_name_map(number, config.get_text_config().num_hidden_layers)
    with torch.device("meta"):
        parameters = network_class(config).state_dict()
    names = {}
    for parameter in parameters:
        name, _, suffix = parameter.rpartition(".")
        # An output layer that is always tied has none.
        if (own := known.get_name(name)) is not None:
            names[f"{own}.{suffix}"] = parameter
    return names


def plain_tensor(tensor: GgufTensor, processor: Any) -> Tensor:
    """A tensor in its own type, as transformers' model has it."""
    dtype = _DTYPES[tensor.kind]
    plain = torch.from_numpy(tensor.data).view(dtype).view(tensor.shape)
    if dtype == torch.bfloat16:
        # numpy has no such type.
        plain = plain.float()
    return torch.from_numpy(_processed(processor, plain.numpy(), tensor.name)).to(dtype)


def _read(tensor: GgufTensor, processor: Any) -> QuantizedWeight:
    rows = torch.from_numpy(tensor.data).view(tensor.shape[0], -1)
    weight = weight_of(rows, tensor.kind)
    order = _row_order(processor, weight.num_outputs, tensor.name)
    return weight if order is None else weight.selected(order)


def _row_order(processor: Any, num_rows: int, name: str) -> Tensor | None:
    """The order into which transformers brings the rows of a tensor; None if it keeps them."""
    before = np.arange(num_rows)
    after = _processed(processor, before, name)
    if np.array_equal(before, after):
        return None
    if not np.array_equal(before, np.sort(after)):
        raise ModelError(f"{name}: transformers does not only reorder rows")
    return torch.from_numpy(after.copy())


def _processed(processor: Any, rows: Any, name: str) -> Any:
    """The rows of a tensor in transformers' order. ModelError if they do not fit the heads."""
    try:
        return processor.process(rows, name=name).weights
    except ValueError as error:
        raise ModelError(
            f"{name}: {len(rows)} rows, which do not fit the heads of the metadata: {error}"
        ) from error
