"""Harmony, the format of gpt-oss: messages of channels, each with a header."""

import re
from collections.abc import Callable

from gateway_svc.output_formats import json_text
from gateway_svc.output_formats.calls import CallWriter
from gateway_svc.output_formats.reader import Reader, Step

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, CALL, RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_FUNCTIONS = "functions."
# A header, with or without its end. Possessive, so that the time is linear in its length.
_HEADER = re.compile(
    rf"({re.escape(START)}\s*+\w*+)?( to=[^\s<]*+)?({re.escape(CHANNEL)}\s*+\w*+)?"
    rf"( to=[^\s<]*+)?(\s*+({re.escape(CONSTRAIN)})?\w*+)?"
)


def harmony(
    reader: Reader,
    calls: CallWriter,
    reason: Callable[[str], object],
    set_reasoning: Callable[[bool], object],
) -> Step[None]:
    """The channel `analysis` is reasoning, a message to `functions.f` is a call, and everything
    else is content. The prompt has the start of the first header. `set_reasoning` is called where
    reasoning begins and ends."""
    while True:
        while (yield from reader.accept(END, CALL, RETURN)) is not None:
            pass
        if not (yield from reader.peek()):
            return
        reader.mark()
        begin = yield from reader.accept(START, CHANNEL, " to=")
        if begin is None:
            # Text without a header.
            yield from reader.until(_ENDS, calls.content)
            continue
        header = [begin]
        if not (yield from reader.until((MESSAGE,), header.append)):
            if not _HEADER.fullmatch(reader.since_mark):
                calls.content(reader.since_mark)
            return
        yield from reader.accept(MESSAGE)
        recipient = _RECIPIENT.search("".join(header))
        channel = _CHANNEL.search("".join(header))
        name = recipient[1] if recipient is not None else ""
        if name.startswith(_FUNCTIONS) and calls.tools.schemas:
            yield from _call(reader, calls, name.removeprefix(_FUNCTIONS))
        elif channel is not None and channel[1] == "analysis":
            set_reasoning(True)
            yield from reader.until(_ENDS, reason)
            set_reasoning(False)
        else:
            yield from reader.until(_ENDS, calls.content)


def _call(reader: Reader, calls: CallWriter, name: str) -> Step[None]:
    yield from reader.skip_space()
    calls.start(name)
    if (yield from reader.peek()) == "{" and (yield from json_text.value(reader, calls.arguments)):
        calls.end()
        yield from reader.skip_space()
        return
    yield from reader.until(_ENDS, lambda text: None)
    calls.abandon()
