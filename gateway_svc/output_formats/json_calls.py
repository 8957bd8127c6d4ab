"""Formats whose calls are JSON objects: Hermes' (also Qwen's), Llama's, Mistral's, and a list."""

from gateway_svc.output_formats import json_text
from gateway_svc.output_formats.calls import CallWriter, call_object
from gateway_svc.output_formats.reader import Reader, Step

_NAME = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"


def hermes(reader: Reader, calls: CallWriter) -> Step[None]:
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`, any number of them."""
    while (yield from calls.until_call(("<tool_call>",), ("</tool_call>",))):
        yield from reader.skip_space()
        yield from call_object(reader, calls)


def llama(reader: Reader, calls: CallWriter) -> Step[None]:
    """`{"name": "f", "parameters": {}}`, with or without `<|python_tag|>` before it. Objects that
    begin the output are calls only if they have the name of a tool; more follow after `;`."""
    reader.mark()
    yield from reader.skip_space()
    is_call = (yield from reader.peek()) == "{"
    if not is_call:
        reader.put_back()
    while is_call and (yield from call_object(reader, calls, is_bare=True)):
        yield from reader.skip_space()
        is_call = (yield from reader.accept(";")) is not None
        yield from reader.skip_space()
    # A grammar has no calls with the tag: what follows it would not be held to a schema.
    starts = () if calls.tools.are_guided else (_PYTHON_TAG,)
    while (yield from calls.until_call(starts, (";",))):
        yield from reader.skip_space()
        yield from call_object(reader, calls)


def mistral(reader: Reader, calls: CallWriter) -> Step[None]:
    """`[TOOL_CALLS][{"name": "f", "arguments": {}}]`, or `[TOOL_CALLS]f[ARGS]{}` per call, with an
    id in front of the arguments where the model writes one."""
    while (yield from calls.until_call((_TOOL_CALLS,))):
        yield from reader.skip_space()
        if (yield from reader.peek()) == "[":
            yield from _list(reader, calls)
        else:
            yield from _named(reader, calls)


def json_list(reader: Reader, calls: CallWriter) -> Step[None]:
    """`[{"name": "f", "parameters": {}}]` as the whole output: the format of guided calls of models
    that have none."""
    reader.mark()
    yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        yield from _list(reader, calls)
    else:
        reader.put_back()
    yield from calls.until_call(())


def _list(reader: Reader, calls: CallWriter) -> Step[None]:
    separator = yield from reader.accept("[")
    while separator in ("[", ","):
        yield from reader.skip_space()
        if not (yield from call_object(reader, calls)):
            return
        yield from reader.skip_space()
        separator = yield from reader.accept(",", "]")
    reader.mark()


def _named(reader: Reader, calls: CallWriter) -> Step[None]:
    name = yield from reader.while_in(_NAME)
    if (yield from reader.accept("[CALL_ID]")) is not None:
        yield from reader.while_in(_NAME)
    yield from reader.accept("[ARGS]")
    yield from reader.skip_space()
    if name and (yield from reader.peek()) == "{":
        calls.start(name)
        if (yield from json_text.value(reader, calls.arguments)):
            calls.end()
            return
    calls.abandon()
