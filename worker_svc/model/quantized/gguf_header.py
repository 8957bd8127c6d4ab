"""Reads the header of GGUF files: metadata, and where tensors are.

The package `gguf` does the same, but spends seconds on the tokens of a usual vocabulary. Lists are
skipped here: they describe the tokenizer.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

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
    metadata = dict(reader.entry() for _ in range(num_entries))
    infos = [reader.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get(_ALIGNMENT, 32)
    start = -(-reader.offset // alignment) * alignment
    return metadata, tuple(_tensor(mapped, start, *info) for info in infos)


class _Reader:
    """Reads values one after another. ValueError at the end of the file."""

    def __init__(self, content: memoryview) -> None:
        self.offset = 0
        self._content = content

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > len(self._content):
            raise ValueError("the file ends in its header")
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

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and place of a tensor."""
        name, num_dims = self.text(), self.number("I")
        dims = [self.number("Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self.number("I"), self.number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _LIST:
            return self._skip_list(self.number("I"), self.number("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"metadata of the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def _skip_list(self, kind: int, length: int) -> None:
        if kind in _SCALARS:
            self._skip(length * struct.calcsize(f"<{_SCALARS[kind]}"))
        elif kind == _STRING:
            read = struct.Struct("<Q").unpack_from
            for _ in range(length):
                if self.offset + 8 > len(self._content):
                    raise ValueError("the file ends in its header")
                self.offset += 8 + read(self._content, self.offset)[0]
        else:
            for _ in range(length):
                self._value(kind)

    def _skip(self, num_bytes: int) -> None:
        self.offset += num_bytes


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
