"""JSON values within a text that arrives in parts."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway_svc.output_formats.reader import Reader, Step
from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.json_values import read_json

_PLAIN = re.compile(r'[^"\\]+')
# Outside of strings.
_STRUCTURE = re.compile(r'[^"{}\[\]]+')
_FOREIGN = re.compile(r"[^\s\w,:.+\-]")
_CLOSING = {"{": "}", "[": "]"}


def string(reader: Reader) -> Step[str | None]:
    """Consume a string; None if there is none, or it is not valid."""
    parts: list[str] = []
    if not (yield from _string_text(reader, parts.append)):
        return None
    try:
        value = read_json("".join(parts))
    except FormatError:
        return None
    return value if isinstance(value, str) else None


def value(reader: Reader, emit: Callable[[str], object]) -> Step[bool]:
    """Consume a value and pass its text on. False where it cannot be JSON; what is True may still
    not be valid."""
    first = yield from reader.peek()
    if first == '"':
        return (yield from _string_text(reader, emit))
    if first in _CLOSING:
        return (yield from _nested(reader, emit))
    scalar = yield from reader.while_in("-+.eE0123456789truefalsn")
    emit(scalar)
    return bool(scalar)


def _nested(reader: Reader, emit: Callable[[str], object]) -> Step[bool]:
    """An object or an array."""
    closing: list[str] = []
    while True:
        character = yield from reader.peek()
        if not character:
            return False
        if character == '"':
            if not (yield from _string_text(reader, emit)):
                return False
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
            emit(reader.take(1))
        elif character in "}]":
            if character != closing.pop():
                return False
            emit(reader.take(1))
            if not closing:
                return True
        else:
            found = _STRUCTURE.match(reader.text)
            assert found is not None
            foreign = _FOREIGN.search(found.group())
            emit(reader.take(found.end() if foreign is None else foreign.start()))
            if foreign is not None:
                return False


def _string_text(reader: Reader, emit: Callable[[str], object]) -> Step[bool]:
    """A string with its quotes."""
    if (yield from reader.peek()) != '"':
        return False
    emit(reader.take(1))
    while True:
        character = yield from reader.peek()
        if not character:
            return False
        if character == "\\":
            while len(reader.text) < 2:
                if not (yield from reader.more()):
                    return False
            emit(reader.take(2))
        elif character == '"':
            emit(reader.take(1))
            return True
        else:
            found = _PLAIN.match(reader.text)
            assert found is not None
            emit(reader.take(found.end()))


def is_object(text: str) -> bool:
    """Whether the text is a JSON object that a message may have as the arguments of a call."""
    try:
        return isinstance(read_json(text), dict)
    except FormatError:
        return False


def plain_values(schema: Any) -> Sequence[str] | None:
    """Of a value that a grammar has as plain text, in formats that write arguments one by one: the
    texts that it may be, all if there are none. None: the grammar has JSON."""
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
        return values
    return () if schema.get("type") == "string" else None


def of_text(text: str, schema: Any) -> str:
    """The JSON of a value that a format writes as plain text. A text is a string where the schema
    permits one, null if it permits that too; else it is JSON if it can be."""
    types = _types(schema)
    stripped = text.strip()
    if "string" in types:
        is_null = "null" in types and stripped == "null"
        return "null" if is_null else json.dumps(text, ensure_ascii=False)
    candidate = _PYTHON.get(stripped, stripped)
    try:
        read_json(candidate)
    except FormatError:
        return json.dumps(text, ensure_ascii=False)
    return candidate


_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _types(schema: Any) -> set[str]:
    """The types that a schema names; empty if it names none. Unless a grammar holds calls to the
    schemas of their tools, a schema is any JSON value."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {one for one in named if isinstance(one, str)}
    if isinstance(values := schema.get("enum"), list) and values:
        return {"string"} if all(isinstance(one, str) for one in values) else set()
    alternatives = (schema.get("anyOf"), schema.get("oneOf"))
    listed = [one for ones in alternatives if isinstance(ones, list) for one in ones]
    return set().union(*map(_types, listed))
