"""Writes the pieces of calls and of the content between them."""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from gateway_svc.output_formats import json_text
from gateway_svc.output_formats.pieces import Arguments, CallEnd, CallStart, Content, Piece
from gateway_svc.output_formats.reader import Reader, Step

# Of a tool, and so of a call: clients send calls back. As long as in Anthropic's API: names that
# agents give to tools of MCP servers begin with the server's.
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class Tools:
    """What a parser knows of a request's tools."""

    # The schemas of their parameters by name, None for formats that do not need them.
    schemas: Mapping[str, Any] = field(default_factory=dict)
    # A grammar holds the output to the format: calls are certain from their first token.
    are_guided: bool = False
    # The output is calls only, which a grammar holds to the format.
    are_forced: bool = False
    # Calls after the first one are dropped.
    is_single: bool = False
    # Calls begin the output, or there are none: a marker in content, such as one that a string of
    # JSON quotes, is text.
    begin_output: bool = False
    # Tools whose arguments a grammar holds to their schemas, in formats that write them one by one.
    held_names: Set[str] = frozenset()


class CallWriter:
    """Collects the pieces of one output.

    A call is held back until it is complete, unless the output is guided: so one that proves
    not to be a call comes back as the text that it is.
    """

    def __init__(self, reader: Reader, emit: Callable[[Piece], object], tools: Tools) -> None:
        self.tools = tools
        self._reader = reader
        self._emit = emit
        self._num_calls = 0
        # Of the call that is read.
        self._held: list[Piece] = []
        # No text of it can prove that it is none.
        self._is_certain = False
        self._name = ""
        self._arguments: list[str] = []
        self._has_begun = False
        # White space at the start and after calls, which is dropped before a call.
        self._is_at_border = True
        # What was dropped before the call that is read.
        self._space = ""

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def content(self, text: str) -> None:
        if text:
            self._emit(Content(text))

    def until_call(self, starts: Sequence[str], dropped: Sequence[str] = ()) -> Step[str | None]:
        """Pass content on until one of `starts`, and consume it; None if the text ends without.
        White space before the first call and around calls is dropped, as are the markers
        `dropped` right after a call."""
        if self._is_at_border:
            found = yield from self._at_border(starts, dropped)
            if found is not None:
                return found
        if self.tools.begin_output:
            starts = ()
        if not (yield from self._reader.until(starts, self.content)):
            return None
        self._reader.mark()
        return (yield from self._reader.accept(*starts))

    def _at_border(self, starts: Sequence[str], dropped: Sequence[str]) -> Step[str | None]:
        space = yield from self._reader.skip_space()
        if self.has_calls:
            while (yield from self._reader.accept(*dropped)) is not None:
                space = yield from self._reader.skip_space()
        self._reader.mark()
        found = yield from self._reader.accept(*starts)
        if found is not None:
            self._space = space
        else:
            self._is_at_border = False
            has_more = bool((yield from self._reader.peek()))
            if self._reader.has_ended and self._is_marker_begin(starts, dropped):
                self._reader.take(len(self._reader.text))
            elif has_more or not self.has_calls:
                self.content(space)
        return found

    def _is_marker_begin(self, starts: Sequence[str], dropped: Sequence[str]) -> bool:
        """Whether the rest of a text that has ended can only be a marker that is cut."""
        markers = [*dropped] if self.has_calls else []
        if self.tools.are_forced or (self.tools.are_guided and self.has_calls):
            markers += starts
        return any(marker.startswith(self._reader.text) for marker in markers)

    def start(self, name: str) -> None:
        """Begin a call, whose text begins at the reader's mark."""
        held = self.tools.held_names
        self._is_certain = self.tools.are_guided and (not held or name in held)
        self._name = name
        self._arguments = []
        self._has_begun = True
        self._put(CallStart(self._num_calls, name))

    def arguments(self, text: str) -> None:
        self._arguments.append(text)
        self._put(Arguments(self._num_calls, text))

    def end(self) -> bool:
        """The call is complete. False if no tool can have its name, or its arguments are no object:
        it is abandoned then."""
        if not self._is_certain and not self._is_valid():
            return self.abandon()
        self._put(CallEnd(self._num_calls))
        for piece in self._held:
            self._emit_call(piece)
        self._held = []
        self._space = ""
        self._has_begun = False
        self._num_calls += 1
        self._is_at_border = True
        self._reader.mark()
        return True

    def abandon(self) -> bool:
        """What was read since the reader's mark is no call, but content, with the white space in
        front of it. A guided call that the end of the text cuts is left as it is, or left out if it
        has no name yet: its rest is missing. Returns False."""
        is_cut = self.tools.are_guided and self._reader.has_ended and not self._has_begun
        if not (is_cut or (self._is_certain and self._has_begun)):
            self.content(self._space + self._reader.since_mark)
        elif self._reader.has_ended:
            # Half of an escape or of a marker, which would be content.
            self._reader.take(len(self._reader.text))
        self._held = []
        self._space = ""
        self._has_begun = False
        self._is_at_border = False
        self._reader.mark()
        return False

    def _is_valid(self) -> bool:
        has_name = TOOL_NAME.fullmatch(self._name) is not None
        return has_name and json_text.is_object("".join(self._arguments))

    def _put(self, piece: Piece) -> None:
        if self._is_certain:
            self._emit_call(piece)
        else:
            self._held.append(piece)

    def _emit_call(self, piece: Piece) -> None:
        if not (self.tools.is_single and self._num_calls):
            self._emit(piece)


def call_object(reader: Reader, calls: CallWriter, is_bare: bool = False) -> Step[bool]:
    """Read a call such as `{"name": "f", "arguments": {}}`, with `parameters` for `arguments` too,
    in any order. False if it is none: it is abandoned then. A bare one has no marker that makes it
    a call: it needs the name of a tool, and arguments."""
    if (yield from _fields(reader, calls, is_bare)):
        return calls.end()
    return calls.abandon()


def _fields(reader: Reader, calls: CallWriter, is_bare: bool) -> Step[bool]:
    name: str | None = None
    arguments: list[str] = []
    separator = yield from reader.accept("{")
    if separator is None:
        return False
    while separator != "}":
        key = yield from _key(reader)
        if key == "name" and name is None:
            name = yield from json_text.string(reader)
            if name is None or (is_bare and name not in calls.tools.schemas):
                return False
            calls.start(name)
            calls.arguments("".join(arguments))
        elif key in ("arguments", "parameters") and not arguments:
            emit = arguments.append if name is None else _both(arguments.append, calls.arguments)
            if not (yield from json_text.value(reader, emit)):
                return False
        elif key not in ("type", "id") or (yield from json_text.string(reader)) is None:
            return False
        yield from reader.skip_space()
        separator = yield from reader.accept(",", "}")
        if separator is None:
            return False
    if name is None or (is_bare and not arguments):
        return False
    if not arguments:
        calls.arguments("{}")
    return True


def _key(reader: Reader) -> Step[str | None]:
    """The next key of an object, with its colon."""
    yield from reader.skip_space()
    key = yield from json_text.string(reader)
    yield from reader.skip_space()
    if (yield from reader.accept(":")) is None:
        return None
    yield from reader.skip_space()
    return key


def _both(*functions: Callable[[str], object]) -> Callable[[str], None]:
    def call(text: str) -> None:
        for function in functions:
            function(text)

    return call
