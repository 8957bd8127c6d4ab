"""Broken headers of GGUF files: each is refused with the file's name and a reason."""

import struct
from pathlib import Path

import pytest

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.gguf_file import GgufFile

pytest.importorskip("gguf")

_UINT32, _STRING, _LIST = 4, 8, 9
_MANY = 2**60


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def list_of(kind: int, length: int) -> bytes:
    return struct.pack("<IQ", kind, length)


def tensor(dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text("weight") + shape + struct.pack("<IQ", kind, offset)


ARCHITECTURE = entry("general.architecture", _STRING, text("llama"))
NUMBER = struct.pack("<I", 1)


def refused(tmp_path: Path, message: str, *entries: bytes, tensors: tuple[bytes, ...] = ()) -> None:
    file = tmp_path / "model.gguf"
    counts = struct.pack("<IQQ", 3, len(tensors), 1 + len(entries))
    file.write_bytes(b"GGUF" + counts + ARCHITECTURE + b"".join(entries) + b"".join(tensors))
    with pytest.raises(ModelError, match=message) as found:
        GgufFile.open(file)
    assert str(found.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        (_UINT32, struct.pack("<I", 0), "0"),
        (_UINT32, struct.pack("<I", 24), "24"),
        (_STRING, text("x"), "'x'"),
        (_LIST, list_of(_UINT32, 0), "None"),
    ],
)
def test_alignments(kind: int, value: bytes, shown: str, tmp_path: Path) -> None:
    message = f"general.alignment is {shown}, which is not a power of two"
    refused(tmp_path, message, entry("general.alignment", kind, value))


def test_numbers_of_parts(tmp_path: Path) -> None:
    message = "split.count is 'x', which is not an integer"
    refused(tmp_path, message, entry("split.count", _STRING, text("x")))


def test_nested_lists(tmp_path: Path) -> None:
    nested = list_of(_LIST, 1) * 5000 + list_of(_UINT32, 0)
    refused(tmp_path, "lists of metadata more than 8 deep", entry("a", _LIST, nested))


@pytest.mark.parametrize(
    "value",
    [
        list_of(_LIST, _MANY),
        list_of(_LIST, _MANY) + list_of(_UINT32, 0) * 100,
        list_of(_UINT32, _MANY),
        list_of(_STRING, _MANY),
        list_of(_STRING, 1) + struct.pack("<Q", _MANY),
    ],
)
def test_lists_longer_than_the_file(value: bytes, tmp_path: Path) -> None:
    refused(tmp_path, "the file ends in its header", entry("a", _LIST, value))


def test_unknown_types_of_metadata(tmp_path: Path) -> None:
    refused(tmp_path, "metadata of the unknown type 99", entry("a", 99, b""))
    refused(tmp_path, "metadata of the unknown type 99", entry("a", _LIST, list_of(99, 0)))


def test_keys_and_tensors_that_occur_twice(tmp_path: Path) -> None:
    refused(tmp_path, "it has a twice", *[entry("a", _UINT32, NUMBER)] * 2)
    refused(tmp_path, "it has weight twice", tensors=(tensor([1]),) * 2)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (text("weight") + struct.pack("<I", 2**31), "weight: 2147483648 dimensions"),
        (tensor([]), r"weight: \(\) inputs"),
        (tensor([2**63, 2**63]), "the file ends in or before weight"),
        (tensor([1], offset=2**64 - 1), "the file ends in or before weight"),
        (tensor([1], kind=999), "999 is not a valid"),
    ],
)
def test_tensors(info: bytes, message: str, tmp_path: Path) -> None:
    refused(tmp_path, message, tensors=(info,))
