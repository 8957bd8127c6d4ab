"""Tokens, text and end of one choice. Pure."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from gateway_svc.generation import output_parsing
from gateway_svc.generation.choice_parser import (
    ChoiceParser,
    ParsedOutput,
    ParsedPiece,
    ToolCallDelta,
)
from gateway_svc.generation.output_parsing import CallIds
from gateway_svc.scheduler.events import ChoiceEvent, Ended, TokenLogprobs
from gateway_svc.text.detokenizer import Detokenizer
from gateway_svc.text.served_model import Model
from gateway_svc.text.stop_strings import StopChecker
from gateway_svc.text.text_offsets import TextOffsets
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import invalid

# Of choices without a parser.
_UNPARSED: Final = ParsedOutput("")


@dataclass(frozen=True)
class ChoiceEnd:
    """How a choice ended: by a stop string, a stop token, its only call, or else by length."""

    num_cached_prompt_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None
    # The output has calls of tools, and a stop string has cut none of them.
    has_calls: bool = False
    # It ended with a call, where several are not wanted.
    by_call: bool = False

    @property
    def is_stop(self) -> bool:
        return self.stop_string is not None or self.stop_token_id is not None or self.by_call


@dataclass(frozen=True)
class ChoiceUpdate:
    """What a batch of events added to a choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    # Position of token_ids[0] within the choice.
    first_index: int
    # Set in the last update.
    end: ChoiceEnd | None
    # One per entry of token_ids; empty unless requested.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # The characters of the choice before each token; empty unless requested.
    text_offsets: tuple[int, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    # In order, with the text; empty unless the output is parsed.
    pieces: tuple[ParsedPiece, ...] = ()


class Choice:
    """Converts the scheduler's events of one choice into updates for its client.

    The text emitted up to a token depends only on the tokens up to it. So the choice can be resumed
    after any token.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer | None,
        stops: Sequence[str],
        stop_token_ids: Set[int],
        next_index: int = 0,
        include_stop: bool = False,
        first_text_offset: int | None = None,
        min_tokens: int = 0,
        parser: ChoiceParser | None = None,
    ) -> None:
        """The client has the tokens before `next_index`, with their text. There is no text without
        a detokenizer. `include_stop` keeps the stop string or token in the text. No string ends in
        the text of the first `min_tokens` tokens. With `first_text_offset`, updates with
        log-probabilities have the text offset of each token, which takes decoding one by one.
        `parser` splits the text; without one it is all content."""
        self.index = index
        self.num_tokens = 0
        # The stop string that was found; nothing is emitted after it.
        self.stop_string: str | None = None
        # None until the choice has ended.
        self.end: ChoiceEnd | None = None
        self._is_ended_by_call = False
        self._detokenizer = detokenizer
        self._stops = StopChecker(stops)
        self._parser = parser
        self._has_stops = bool(stops)
        self._hidden_ids = frozenset() if include_stop else stop_token_ids
        self._next_index = next_index
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._has_text_offsets = first_text_offset is not None
        self._offsets = TextOffsets(detokenizer, first_text_offset or 0)

    def process(self, events: Iterable[ChoiceEvent]) -> ChoiceUpdate:
        """Process events of this choice, in order and without gaps; an end is the last.

        Tokens after a stop string or the only call are dropped. RequestError if the choice ends
        before `next_index`.
        """
        num_before = self.num_tokens
        first_index = max(num_before, self._next_index)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        end = None
        for event in events:
            if isinstance(event, Ended):
                end = event
            else:
                token_ids += event.token_ids
                logprobs += event.logprobs
        offsets: list[int] = []
        texts = self._decode_new(
            token_ids, offsets if logprobs and self._has_text_offsets else None
        )
        # Before `_end`, which may keep fewer tokens.
        new = slice(first_index - num_before, self.num_tokens - num_before)
        if end is not None:
            texts.append(self._end(end))
        text = "".join(texts)
        parsed = _UNPARSED if self._parser is None else self._parser.take()
        return ChoiceUpdate(
            self.index,
            text if self._parser is None else parsed.text,
            tuple(token_ids[new]),
            first_index,
            self.end,
            tuple(logprobs[new]),
            tuple(offsets[new]),
            parsed.reasoning,
            parsed.tool_calls,
            parsed.pieces,
        )

    @property
    def has_stopped(self) -> bool:
        """Whether its text has an end, which the scheduler does not know of."""
        return self.stop_string is not None or self._is_ended_by_call

    @property
    def num_reasoning_tokens(self) -> int:
        return (
            0 if self._parser is None else min(self._parser.num_reasoning_tokens, self.num_tokens)
        )

    @property
    def received_pieces(self) -> Sequence[ParsedPiece]:
        """What the client had before the first update, if the output is parsed."""
        return () if self._parser is None else self._parser.received

    def _decode_new(self, token_ids: Sequence[int], offsets: list[int] | None) -> list[str]:
        """Return the texts to emit, up to an end in the text. Appends each token's text offset to
        `offsets`."""
        texts: list[str] = []
        for segment in self._split_token_ids(token_ids, offsets is not None):
            if self.has_stopped:
                break
            text = self._decode(segment, offsets)
            is_new = self.num_tokens > self._next_index
            if self._parser is not None:
                self._parser.push(text, self.num_tokens, is_new)
                self._is_ended_by_call = (
                    self._parser.has_only_call and self.num_tokens >= self._min_tokens
                )
            if is_new:
                texts.append(text)
        return texts

    def _split_token_ids(self, token_ids: Sequence[int], is_each: bool) -> Iterable[Sequence[int]]:
        """Split tokens where the text up to there is needed: at `next_index`, and after every
        token with stop strings, with a parser, or if `is_each`.
        """
        if len(token_ids) == 1:
            return (token_ids,)
        if self._has_stops or is_each or self._parser is not None:
            return zip(token_ids)
        num_received = max(0, self._next_index - self.num_tokens)
        return filter(None, (token_ids[:num_received], token_ids[num_received:]))

    def _decode(self, segment: Sequence[int], offsets: list[int] | None) -> str:
        """Count tokens, and return the text that may be emitted with the last of them. A stop
        token ends the choice and is part of its text only on request. With `offsets` the segment
        is one token.
        """
        self.num_tokens += len(segment)
        shown = [token_id for token_id in segment if token_id not in self._hidden_ids]
        if offsets is None:
            text = self._offsets.push(shown)
        else:
            offset, text = self._offsets.push_one(shown[0] if shown else None)
            offsets.append(offset)
        return self._check_stops(text)

    def _end(self, ended: Ended) -> str:
        """Return the text held back. A stop string, found before or in it, and the only call take
        precedence over the scheduler's reason.
        """
        text = ""
        has_calls = self._is_ended_by_call
        if not has_calls:
            text = self._flush()
            has_calls = self._parser is not None and self._parser.end(text, self.num_tokens)
        self.num_tokens = min(self.num_tokens, ended.num_tokens)
        if self.num_tokens < self._next_index:
            raise invalid(
                f"next_token_indices[{self.index}]",
                "TOKEN_INDEX_PAST_END",
                f"is {self._next_index}; the choice has ended with {self.num_tokens} tokens",
            )
        by_token = not self.has_stopped and ended.reason == scheduler_pb2.END_REASON_STOP_TOKEN
        self.end = ChoiceEnd(
            ended.num_cached_prompt_tokens,
            self.stop_string,
            ended.stop_token_id if by_token else None,
            has_calls,
            self._is_ended_by_call,
        )
        return text

    def _flush(self) -> str:
        text = ""
        if self.stop_string is None and self._detokenizer is not None:
            text = self._check_stops(self._detokenizer.flush())
        return text if self.stop_string is not None else text + self._stops.flush()

    def _check_stops(self, text: str) -> str:
        if not self._has_stops:
            return text
        checked = self._stops.push(text, self.num_tokens > self._min_tokens)
        self.stop_string = checked.stop
        return checked.text + (checked.stop or "") if self._include_stop else checked.text


def create_choices(
    request_id: str, state: gateway_pb2.ResumeState, model: Model, next_indices: Sequence[int] = ()
) -> tuple[Choice, ...]:
    """Create the choices of a request, in order. The client has the tokens before `next_indices`,
    none where absent. RequestError if there are more indices than choices.
    """
    if len(next_indices) > state.num_choices:
        raise invalid(
            "next_token_indices",
            "TOO_MANY_NEXT_TOKEN_INDICES",
            f"has {len(next_indices)} entries; the request has {state.num_choices} choices",
        )
    skip, context = state.skip_special_tokens, state.context_token_ids
    stop_token_ids = frozenset(state.stop_token_ids)
    has_offsets = state.http.format == gateway_pb2.FORMAT_COMPLETION
    first_text_offset = len(state.http.echo) if has_offsets else None
    is_parsed = state.HasField("parsing") and not state.omit_text
    shown = output_parsing.marker_ids(state.parsing, model.vocabulary) if is_parsed else frozenset()
    return tuple(
        Choice(
            index,
            None if state.omit_text else Detokenizer(model.vocabulary, skip, context, shown),
            state.stop,
            stop_token_ids,
            next_index,
            state.include_stop_str_in_output,
            first_text_offset,
            state.min_tokens,
            _parser(request_id, index, state.parsing) if is_parsed else None,
        )
        for index, next_index in zip_longest(range(state.num_choices), next_indices, fillvalue=0)
    )


def _parser(request_id: str, choice: int, parsing: gateway_pb2.OutputParsing) -> ChoiceParser:
    return ChoiceParser(
        output_parsing.parser(parsing),
        CallIds(request_id, choice, parsing.tool_format),
        parsing.omit_reasoning,
        parsing.single_call,
    )
