"""Reads the header of GGUF files: metadata, and where tensors are.

The package `gguf` does the same, but spends seconds on the tokens of a usual vocabulary. Lists are
skipped here: they describe the tokenizer.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_LIST: Final = 9
# The other types of metadata, as formats of `struct`.
_SCALARS: Final[Mapping[int, str]] = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"},
    **{7: "?", 10: "Q", 11: "q", 12: "d"},
}
_ALIGNMENT: Final = "general.alignment"
_MAX_DEPTH: Final = 8  # of lists in lists
_MAX_DIMS: Final = 4  # as in ggml
_TRUNCATED: Final = "the file ends in its header"
_T = TypeVar("_T")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a mapped file."""

    name: str
    kind: str  # such as `F16` or `Q4_K`
    shape: tuple[int, ...]  # the inputs of a weight last
    data: Any  # uint8 of numpy, in one dimension; written parts are not written to the file


def read_header(path: Path) -> tuple[Mapping[str, Any], tuple[GgufTensor, ...]]:
    """Metadata without lists, and tensors. ValueError if the file is not of this format or not
    complete; OSError if it cannot be read."""
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    mapped = np.memmap(path, np.uint8, "c")
    reader = _Reader(mapped.data)
    if reader.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := reader.number("I")) not in _VERSIONS:
        raise ValueError(f"version {version}; versions 2 and 3 are read")
    num_tensors, num_entries = reader.number("Q"), reader.number("Q")
    metadata = _unique(reader.entry() for _ in range(num_entries))
    infos = _unique(reader.tensor_info() for _ in range(num_tensors))
    alignment = _alignment(metadata)
    start = -(-reader.offset // alignment) * alignment
    return metadata, tuple(_tensor(mapped, start, name, *info) for name, info in infos.items())


class _Reader:
    """Reads values one after another. ValueError at the end of the file."""

    def __init__(self, content: memoryview) -> None:
        self.offset = 0
        self._content = content

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > len(self._content):
            raise ValueError(_TRUNCATED)
        taken = bytes(self._content[self.offset : end])
        self.offset = end
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def entry(self) -> tuple[str, Any]:
        """A key of the metadata and its value."""
        return self.text(), self._value(self.number("I"))

    def tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Name of a tensor, and its shape, type and place."""
        name, num_dims = self.text(), self.number("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"{name}: {num_dims} dimensions, more than {_MAX_DIMS}")
        dims = [self.number("Q") for _ in range(num_dims)]
        return name, (tuple(reversed(dims)), self.number("I"), self.number("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _LIST:
            return self._skip_list(1)
        if kind not in _SCALARS:
            raise ValueError(f"metadata of the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def _skip_list(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"lists of metadata more than {_MAX_DEPTH} deep")
        kind, length = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            self._skip(length * struct.calcsize(f"<{_SCALARS[kind]}"))
        elif kind == _STRING:
            read = struct.Struct("<Q").unpack_from
            for _ in range(length):
                if self.offset + 8 > len(self._content):
                    raise ValueError(_TRUNCATED)
                self.offset += 8 + read(self._content, self.offset)[0]
            self._skip(0)
        elif kind == _LIST:
            for _ in range(length):
                self._skip_list(depth + 1)
        else:
            raise ValueError(f"metadata of the unknown type {kind}")

    def _skip(self, num_bytes: int) -> None:
        self.offset += num_bytes
        if self.offset > len(self._content):
            raise ValueError(_TRUNCATED)


def _unique(pairs: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    found: dict[str, _T] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name} twice")
        found[name] = value
    return found


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get(_ALIGNMENT, 32)
    if type(value) is not int or value <= 0 or value & (value - 1):
        raise ValueError(f"{_ALIGNMENT} is {value!r}, which is not a power of two")
    return value


def _tensor(
    mapped: Any, start: int, name: str, shape: tuple[int, ...], number: int, offset: int
) -> GgufTensor:
    gguf = import_module("gguf")
    kind = gguf.GGMLQuantizationType(number)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_elements = int(np.prod(shape, dtype=object))
    if not shape or shape[-1] % block_size:
        raise ValueError(f"{name}: {shape[-1:]} inputs in blocks of {block_size}")
    num_bytes = num_elements // block_size * block_bytes
    data = mapped[start + offset : start + offset + num_bytes]
    if len(data) != num_bytes:
        raise ValueError(f"the file ends in or before {name}")
    return GgufTensor(name, kind.name, shape, data)
