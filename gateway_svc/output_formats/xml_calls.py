"""Formats whose arguments are written one by one as text: GLM's and Qwen3-Coder's."""

import json

from gateway_svc.output_formats import json_text
from gateway_svc.output_formats.calls import CallWriter
from gateway_svc.output_formats.reader import Reader, Step

_START, _END = "<tool_call>", "</tool_call>"


def glm(reader: Reader, calls: CallWriter) -> Step[None]:
    """`<tool_call>f`, then `<arg_key>k</arg_key><arg_value>v</arg_value>` per argument."""
    while (yield from calls.until_call((_START,))):
        name = yield from _until(reader, ("\n", "<"))
        if name is None or not (yield from _glm_arguments(reader, calls, name.strip())):
            calls.abandon()


def _glm_arguments(reader: Reader, calls: CallWriter, name: str) -> Step[bool]:
    if not name:
        return False
    calls.start(name)
    arguments = _Arguments(calls, name)
    while True:
        yield from reader.skip_space()
        found = yield from reader.accept("<arg_key>", _END)
        if found == _END:
            arguments.end()
            return True
        key = None if found is None else (yield from _until(reader, ("</arg_key>",)))
        if key is None or not (yield from _accept_all(reader, "</arg_key>", "<arg_value>")):
            return False
        key = key.strip()
        text = yield from _value(reader, arguments.is_json(key), "</arg_value>")
        if text is None:
            return False
        arguments.add(key, text)


def qwen_coder(reader: Reader, calls: CallWriter) -> Step[None]:
    """`<function=f>`, then `<parameter=k>v</parameter>` per argument, within `<tool_call>`."""
    while start := (yield from calls.until_call((_START, "<function="), (_END,))):
        if start == _START and not (yield from _accept_all(reader, "<function=")):
            calls.abandon()
            continue
        name = yield from _until(reader, (">",))
        if name is None or not (yield from _qwen_arguments(reader, calls, name.strip())):
            calls.abandon()


def _qwen_arguments(reader: Reader, calls: CallWriter, name: str) -> Step[bool]:
    if not name or not (yield from _accept_all(reader, ">")):
        return False
    calls.start(name)
    arguments = _Arguments(calls, name)
    while True:
        yield from reader.skip_space()
        found = yield from reader.accept("<parameter=", "</function>")
        if found == "</function>":
            arguments.end()
            return True
        key = None if found is None else (yield from _until(reader, (">",)))
        if key is None or not (yield from _accept_all(reader, ">")):
            return False
        key = key.strip()
        text = yield from _value(reader, arguments.is_json(key), "</parameter>")
        if text is None:
            return False
        arguments.add(key, text.removeprefix("\n").removesuffix("\n"))


def _value(reader: Reader, is_json: bool, end: str) -> Step[str | None]:
    """The text of a value and, consumed but left out, the marker behind it; None if there is none.
    A string of JSON may have the marker within it."""
    if is_json:
        yield from reader.skip_space()
        parts: list[str] = []
        found = yield from json_text.value(reader, parts.append)
        text = "".join(parts) if found else None
    else:
        text = yield from _until(reader, (end,))
    if text is None or not (yield from _accept_all(reader, end)):
        return None
    return text


def _until(reader: Reader, markers: tuple[str, ...]) -> Step[str | None]:
    """The text in front of a marker; None if the text ends without one."""
    parts: list[str] = []
    found = yield from reader.until(markers, parts.append)
    return "".join(parts) if found else None


def _accept_all(reader: Reader, *words: str) -> Step[bool]:
    """Consume words with white space around them, except after the last one."""
    for word in words:
        yield from reader.skip_space()
        if (yield from reader.accept(word)) is None:
            return False
    return True


class _Arguments:
    """Writes arguments as one JSON object."""

    def __init__(self, calls: CallWriter, name: str) -> None:
        schema = calls.tools.schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._properties = properties if isinstance(properties, dict) else {}
        self._calls = calls
        self._is_held = name in calls.tools.held_names
        self._keys: set[str] = set()

    def is_json(self, key: str) -> bool:
        """Whether a grammar has the value as JSON, in which strings have quotes."""
        return self._is_held and json_text.plain_values(self._properties.get(key)) is None

    def add(self, key: str, text: str) -> None:
        if key in self._keys:
            return
        schema = None if self.is_json(key) else self._properties.get(key)
        value = json_text.of_text(text, schema)
        separator = ", " if self._keys else "{"
        self._keys.add(key)
        self._calls.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")

    def end(self) -> None:
        self._calls.arguments("}" if self._keys else "{}")
        self._calls.end()
