"""Splits the text of one choice into pieces, and keeps at which token each became certain. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway_svc.generation.output_parsing import CallIds
from gateway_svc.output_formats.parser import OutputParser
from gateway_svc.output_formats.pieces import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
)


@dataclass(frozen=True)
class ToolCallDelta:
    """New output of a call of a tool."""

    index: int
    # Both are set in the first delta of the call.
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ParsedPiece:
    """A piece of the output, and the number of tokens with which it became certain."""

    num_tokens: int
    piece: Piece


@dataclass(frozen=True)
class ParsedOutput:
    """New output of a choice."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    # All of it, in order; empty if the output is not parsed.
    pieces: tuple[ParsedPiece, ...] = ()


class ChoiceParser:
    """The parser of one choice. Text is pushed token by token."""

    def __init__(
        self, parser: OutputParser, call_ids: CallIds, omits_reasoning: bool, is_single: bool
    ) -> None:
        """`is_single`: at most one call is wanted."""
        self._is_single = is_single
        self.call_ids = call_ids
        # Tokens whose text is reasoning or one of its markers.
        self.num_reasoning_tokens = 0
        # What the client had already.
        self.received: list[ParsedPiece] = []
        self._parser = parser
        self._omits_reasoning = omits_reasoning
        # Whether the last call is not complete.
        self._has_open_call = False
        self._new: list[ParsedPiece] = []
        # The last tokens, if they are part of no piece: they may be a marker of reasoning.
        self._num_pending = 0

    def push(self, text: str, num_tokens: int, is_new: bool) -> None:
        """Add the text that became certain with a token, the last of `num_tokens`."""
        was_reasoning = self._parser.is_reasoning
        pieces = self._parser.push(text)
        self._add(pieces, num_tokens, is_new)
        self._num_pending += 1
        if was_reasoning or self._parser.is_reasoning:
            self.num_reasoning_tokens += self._num_pending
            self._num_pending = 0
        elif pieces:
            self._num_pending = 0

    @property
    def has_only_call(self) -> bool:
        """Whether the only call that is wanted is complete."""
        return self._is_single and self._parser.has_calls

    def end(self, text: str, num_tokens: int) -> bool:
        """Add the rest of the text; whether it has calls, and all are complete."""
        self._add(self._parser.push(text), num_tokens, True)
        self._add(self._parser.flush(), num_tokens, True)
        return self._parser.has_calls and not self._has_open_call

    def take(self) -> ParsedOutput:
        """Return what is new since the last call."""
        pieces = tuple(self._new)
        self._new = []
        return ParsedOutput(
            "".join(one.piece.text for one in pieces if isinstance(one.piece, Content)),
            "".join(one.piece.text for one in pieces if isinstance(one.piece, Reasoning)),
            tuple(self._tool_calls(one.piece for one in pieces)),
            pieces,
        )

    def _add(self, pieces: Sequence[Piece], num_tokens: int, is_new: bool) -> None:
        for piece in pieces:
            if isinstance(piece, CallStart | CallEnd):
                self._has_open_call = isinstance(piece, CallStart)
        target = self._new if is_new else self.received
        target += [
            ParsedPiece(num_tokens, piece)
            for piece in pieces
            if not (self._omits_reasoning and isinstance(piece, Reasoning))
        ]

    def _tool_calls(self, pieces: Iterable[Piece]) -> list[ToolCallDelta]:
        """One delta per call."""
        deltas: dict[int, ToolCallDelta] = {}
        for piece in pieces:
            match piece:
                case CallStart(index, name):
                    deltas[index] = ToolCallDelta(index, self.call_ids[index], name, "")
                case Arguments(index, text):
                    before = deltas.get(index) or ToolCallDelta(index, None, None, "")
                    deltas[index] = ToolCallDelta(
                        index, before.id, before.name, before.arguments + text
                    )
                case CallEnd():
                    pass
        return list(deltas.values())
