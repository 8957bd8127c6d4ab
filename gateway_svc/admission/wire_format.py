"""Counts the fields of a serialized protocol buffer without parsing it.

The format is that of https://protobuf.dev/programming-guides/encoding. The work is bounded by the
maximum number of fields, not by the size.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
# As the parser itself has it.
_MAX_DEPTH = 100
# The bytes that do not end a varint.
_CONTINUED = bytes(range(128, 256))


@dataclass(frozen=True)
class Exceeded:
    """A limit that a request exceeds."""

    # Empty if the request as a whole exceeds it.
    path: str
    reason: str
    description: str


class _MalformedError(Exception):
    """The bytes are no message."""


def largest_field(data: bytes, descriptor: "Descriptor", max_fields: int) -> str:
    """The name of a message's longest field, of the first `max_fields`; empty if it has none of
    its type's, or is malformed. Does not look into submessages, of which there may be millions."""
    name, largest, at = "", 0, 0
    try:
        for _ in range(max_fields):
            if at >= len(data):
                break
            tag, at = _varint(data, at)
            if tag & 7 != _LENGTH:
                at = _skip(data, at, tag & 7)
                continue
            size, at = _varint(data, at)
            at += size
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is not None and size > largest:
                name, largest = field.name, size
    except (_MalformedError, IndexError):
        return ""
    return name


class FieldCounter:
    """Counts fields, also those of submessages, and the numbers of packed fields."""

    def __init__(self, max_fields: int, max_numbers: int) -> None:
        self._max_fields = max_fields
        self._max_numbers = max_numbers
        self._num_fields = 0

    def count(self, data: bytes, descriptor: "Descriptor") -> Exceeded | None:
        """Return the limit that a message exceeds. Malformed bytes exceed one, too: what cannot be
        counted must not reach the parser."""
        try:
            return self._count(data, 0, len(data), descriptor, "", 0)
        except (_MalformedError, IndexError):
            return Exceeded("", "MALFORMED_REQUEST", "cannot be parsed")

    def _count(
        self, data: bytes, at: int, end: int, descriptor: "Descriptor", prefix: str, depth: int
    ) -> Exceeded | None:
        path = prefix
        while at < end:
            if self._num_fields >= self._max_fields:
                return Exceeded(
                    path,
                    "TOO_MANY_FIELDS",
                    f"has too many entries: a request has at most {self._max_fields} fields, "
                    "where a packed list of numbers counts as one",
                )
            self._num_fields += 1
            tag, at = _varint(data, at)
            kind = tag & 7
            field = descriptor.fields_by_number.get(tag >> 3)
            path = prefix if field is None else _path(prefix, field)
            if kind != _LENGTH:
                at = _skip(data, at, kind)
                continue
            size, at = _varint(data, at)
            if at + size > end:
                raise _MalformedError
            if field is not None:
                exceeded = self._count_value(data, at, size, field, path, depth)
                if exceeded is not None:
                    return exceeded
            at += size
        return None

    def _count_value(
        self, data: bytes, at: int, size: int, field: "FieldDescriptor", path: str, depth: int
    ) -> Exceeded | None:
        if field.message_type is not None:
            if depth >= _MAX_DEPTH:
                raise _MalformedError
            return self._count(data, at, at + size, field.message_type, path, depth + 1)
        if field.cpp_type == field.CPPTYPE_STRING or size <= self._max_numbers:
            return None
        num_numbers = len(data[at : at + size].translate(None, _CONTINUED))
        if num_numbers <= self._max_numbers:
            return None
        return Exceeded(
            path,
            "TOO_MANY_NUMBERS",
            f"has {num_numbers} entries; at most {self._max_numbers} are allowed",
        )


def _path(prefix: str, field: "FieldDescriptor") -> str:
    return f"{prefix}.{field.name}" if prefix else field.name


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and the position after it. IndexError if the data ends within."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value, shift = 0, 0
    while shift < 7 * _MAX_VARINT_BYTES:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _MalformedError


def _skip(data: bytes, at: int, kind: int) -> int:
    """The position after a value that has no length."""
    if kind == _VARINT:
        return _varint(data, at)[1]
    if kind not in _FIXED_BYTES:
        # Groups do not exist in proto3; parsers would skip them, with any content.
        raise _MalformedError
    return at + _FIXED_BYTES[kind]
