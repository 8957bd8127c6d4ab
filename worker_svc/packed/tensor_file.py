"""A file of named tensors and a description, which is mapped and not read.

header   64 bytes: magic, bytes of the index, offset of the tensors, bytes of the file,
         SHA-256 of the index
index    JSON: the description, and of each tensor its dtype, shape and offset
tensors  from a multiple of 2 MiB on, each at a multiple of 64 bytes
"""

import ctypes
import hashlib
import json
import struct
from collections.abc import Mapping as ByName
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import torch
from torch import Tensor

from worker_svc.packed.mapping import Mapping

_HEADER: Final = struct.Struct("<8sQQQ32s")
_MAGIC: Final = b"QUIREPK1"
_TENSORS_ALIGNMENT: Final = 2**21
# As torch's allocator aligns.
_ALIGNMENT: Final = 64
_LONGEST_INDEX: Final = 2**28
_BYTES_AT_ONCE: Final = 2**24


class DamagedFileError(ValueError):
    """A file that was not written completely, or changed since; the message says how."""


@dataclass(frozen=True)
class TensorFile:
    """A description and tensors, which point into the mapped file."""

    description: Any
    tensors: dict[str, Tensor]
    mapping: Mapping

    @classmethod
    def open(cls, file: Path) -> Self:
        """Map a file. OSError if that fails; DamagedFileError if header, index or size are wrong.
        The tensors themselves are not checked."""
        index, first = _read_index(file)
        mapping = Mapping(file)
        tensors = {
            name: _tensor(mapping, first + offset, dtype, shape)
            for name, (dtype, shape, offset) in index["tensors"].items()
        }
        return cls(index["description"], tensors, mapping)


class TensorFileWriter:
    """The content of such a file."""

    def __init__(self, description: Any, tensors: ByName[str, Tensor]) -> None:
        """`description` is of JSON's types. A tensor of two names is stored once."""
        places: dict[tuple[int, int], int] = {}
        self._stored: list[tuple[int, Tensor]] = []
        entries, end = {}, 0
        for name, tensor in tensors.items():
            dense = tensor.contiguous()
            place = (dense.data_ptr(), dense.nbytes)
            if place not in places:
                places[place] = end
                self._stored.append((end, dense))
                end = _aligned(end + dense.nbytes, _ALIGNMENT)
            dtype = str(dense.dtype).removeprefix("torch.")
            entries[name] = (dtype, list(dense.shape), places[place])
        self._index = json.dumps({"description": description, "tensors": entries}).encode()
        self._first = _aligned(_HEADER.size + len(self._index), _TENSORS_ALIGNMENT)
        self.num_bytes = self._first + end

    def write(self, file: BinaryIO) -> None:
        """To an empty file. OSError if that fails."""
        digest = hashlib.sha256(self._index).digest()
        file.write(_HEADER.pack(_MAGIC, len(self._index), self._first, self.num_bytes, digest))
        file.write(self._index)
        for offset, tensor in self._stored:
            file.seek(self._first + offset)
            numbers = tensor.flatten().view(torch.uint8).numpy()
            for begin in range(0, len(numbers), _BYTES_AT_ONCE):
                file.write(numbers[begin : begin + _BYTES_AT_ONCE].data)
        file.truncate(self.num_bytes)


def _read_index(file: Path) -> tuple[Any, int]:
    """The index, and the offset of the tensors."""
    with file.open("rb") as opened:
        header = opened.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise DamagedFileError("the header is cut off")
        magic, index_bytes, first, num_bytes, digest = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise DamagedFileError("it does not begin as such a file")
        found = file.stat().st_size
        if found != num_bytes or index_bytes > min(found, _LONGEST_INDEX):
            raise DamagedFileError(f"it has {found} bytes instead of {num_bytes}")
        text = opened.read(index_bytes)
    if hashlib.sha256(text).digest() != digest:
        raise DamagedFileError("the checksum of the index is wrong")
    if first != _aligned(_HEADER.size + index_bytes, _TENSORS_ALIGNMENT):
        raise DamagedFileError(f"its tensors do not begin at {first}")
    return json.loads(text), first


def _tensor(mapping: Mapping, offset: int, dtype: str, shape: list[int]) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for size in shape:
        count *= size
    if not count:
        return torch.empty(shape, dtype=kind)
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(mapping.address + offset)
    # torch keeps the memory's object, and that the mapping.
    memory.mapping = mapping  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=kind).view(shape)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
