"""The tensors of a checkpoint by name, each read when it is needed."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.sources import WeightSource


class StoredTensor(Protocol):
    """A tensor in a file, as a slice of safetensors is one."""

    def get_shape(self) -> Sequence[int]: ...

    def get_dtype(self) -> str:
        """Its name in safetensors, such as `F16` or `I32`."""
        ...

    def __getitem__(self, index: Any) -> Tensor:
        """Read what is indexed."""
        ...


class CheckpointTensors:
    """The tensors of safetensors files, which stay mapped. ModelError if a file cannot be read, or
    if two have a tensor of the same name."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._file_of: dict[str, Any] = {}
        for path in files:
            try:
                file: Any = safe_open(path, framework="pt")
                names = list(file.keys())
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: {error}") from error
            if twice := self._file_of.keys() & names:
                raise ModelError(
                    f"{path} has {min(twice)}, as another file of the folder; remove one"
                )
            self._file_of |= dict.fromkeys(names, file)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def layers(self, suffix: str) -> list[str]:
        """The names before `.suffix`, in order."""
        return sorted(n.removesuffix(f".{suffix}") for n in self.names if n.endswith(f".{suffix}"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that the checkpoint must have."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The name of a dtype in safetensors, such as `F16` or `I32`."""
        return str(self.slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def require(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """ModelError if there is no such tensor, or one of another kind or shape."""
        found = (self.dtype(name), self.shape(name))
        if found[0] not in dtypes or found[1] != shape:
            expected = f"{' or '.join(dtypes)} {list(shape)}"
            raise ModelError(f"{name}: {found[0]} {list(found[1])}, not {expected}")

    def slice(self, name: str) -> StoredTensor:
        stored: StoredTensor = self._file(name).get_slice(name)
        return stored

    def num_bytes(self, names: Iterable[str]) -> int:
        return sum(num_bytes_of(self.slice(name)) for name in names)

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise ModelError(f"the checkpoint has no tensor {name}")
        return self._file_of[name]


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight in a checkpoint."""

    shape: tuple[int, int]  # outputs, inputs
    names: tuple[str, ...]  # of the tensors that it consists of
    num_bytes: int  # of these
    read: WeightSource


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint under the names that transformers has for its tensors."""

    plain: Mapping[str, StoredTensor]
    quantized: Mapping[str, StoredWeight]  # by layer

    @property
    def names(self) -> frozenset[str]:
        """Of plain tensors, and of what the quantised weights stand for."""
        return frozenset(self.plain).union(f"{layer}.weight" for layer in self.quantized)

    def weight_of(self, name: str) -> StoredWeight | None:
        """The quantised weight of that name; None if the tensor is plain."""
        layer, _, suffix = name.rpartition(".")
        return self.quantized.get(layer) if suffix == "weight" else None

    def num_bytes(self, name: str) -> int:
        weight = self.weight_of(name)
        return num_bytes_of(self.plain[name]) if weight is None else weight.num_bytes


def num_bytes_of(stored: StoredTensor) -> int:
    bits = re.search(r"\d+", stored.get_dtype())
    return math.prod(stored.get_shape()) * (8 if bits is None else int(bits[0])) // 8
