"""Parses the output of one choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway_svc.output_formats.calls import CallWriter, Tools
from gateway_svc.output_formats.formats import HARMONY, REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.output_formats.harmony import harmony
from gateway_svc.output_formats.pieces import Piece, Reasoning, joined
from gateway_svc.output_formats.reader import Reader, Step
from gateway_svc.output_formats.reasoning import read_reasoning


@dataclass(frozen=True)
class ParserOptions:
    """How an output is parsed. Formats are names, None where there is nothing to parse."""

    tool_format: str | None = None
    reasoning_format: str | None = None
    # The prompt ends within the reasoning.
    is_reasoning_open: bool = False
    tools: Tools = field(default_factory=Tools)


class OutputParser:
    """Splits text into pieces. Those that were returned depend only on the text pushed so far, and
    joined again with what the markers replace they are the text."""

    def __init__(self, options: ParserOptions) -> None:
        self._reader = Reader()
        self._pieces: list[Piece] = []
        self._calls = CallWriter(self._reader, self._pieces.append, options.tools)
        # The text so far ends within the reasoning, or in front of it.
        self.is_reasoning = options.is_reasoning_open
        self._run = self._parse(options)
        next(self._run)

    def push(self, text: str) -> Sequence[Piece]:
        """Add text, and return the pieces that it makes certain."""
        self._reader.text += text
        return self._advance()

    def flush(self) -> Sequence[Piece]:
        """Return the rest at the end of the text; nothing is pushed afterwards."""
        self._reader.has_ended = True
        return self._advance()

    @property
    def has_calls(self) -> bool:
        """Whether a call is complete."""
        return self._calls.has_calls

    def _advance(self) -> list[Piece]:
        next(self._run, None)
        pieces = joined(self._pieces)
        self._pieces.clear()
        return pieces

    def _parse(self, options: ParserOptions) -> Step[None]:
        if HARMONY in (options.tool_format, options.reasoning_format):
            yield from harmony(self._reader, self._calls, self._reason, self._set_reasoning)
            return
        if options.reasoning_format is not None:
            markers = REASONING_FORMATS[options.reasoning_format]
            yield from read_reasoning(
                self._reader, markers, options.is_reasoning_open, self._reason, self._set_reasoning
            )
        if options.tool_format is None:
            yield from self._reader.until((), self._calls.content)
        else:
            yield from TOOL_FORMATS[options.tool_format].parse(self._reader, self._calls)

    def _reason(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    def _set_reasoning(self, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
