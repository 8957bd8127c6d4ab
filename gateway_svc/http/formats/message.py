"""Anthropic's object `message`, and the events of its stream."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pydantic_core

from gateway_svc.generation.choice import ChoiceEnd, ChoiceUpdate
from gateway_svc.generation.generation import Generation
from gateway_svc.generation.output_parsing import CallIds
from gateway_svc.http.errors import HttpError
from gateway_svc.http.formats.format import Output, ServerEvent, Usage
from gateway_svc.output_formats.pieces import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    joined,
)
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2


class MessageFormat:
    def __init__(self, generation: Generation, model: Model) -> None:
        self._generation = generation
        self._is_replayed = False
        state = generation.state
        parsing = gateway_pb2.OutputParsing() if state is None else state.parsing
        call_ids = CallIds(generation.request_id, 0, parsing.tool_format)
        self._blocks = _Blocks(generation.request_id, call_ids)
        self._fixed = {
            "id": f"msg_{generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model.name,
        }

    def first_events(
        self, choices: Iterable[int], prompt_token_ids: list[int] | None
    ) -> Iterable[ServerEvent]:
        # Which tokens were cached is known at the end.
        usage = Usage(self._generation.num_prompt_tokens, 0, 0)
        yield _event("message_start", message=self._message([], None, usage))

    def events(
        self, index: int, update: ChoiceUpdate, usage: Callable[[], Usage]
    ) -> Iterable[ServerEvent]:
        if not self._is_replayed:
            [choice] = self._generation.choices
            self._blocks.replay(one.piece for one in choice.received_pieces)
            self._is_replayed = True
        yield from self._blocks.add(joined(one.piece for one in update.pieces))
        if update.end is not None:
            yield from self._blocks.close()
            yield _event("message_delta", delta=_stop(update.end), usage=_usage(usage()))
            yield _event("message_stop")

    def last_events(self, usage: Usage) -> Iterable[ServerEvent]:
        return ()

    def error_events(self, error: HttpError) -> Iterable[ServerEvent]:
        return ()

    def body(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        [output] = outputs
        for update in output.updates:
            self._blocks.replay(one.piece for one in update.pieces)
        return self._message(self._blocks.content(), output.end, usage)

    def _message(
        self, content: list[dict[str, Any]], end: ChoiceEnd | None, usage: Usage
    ) -> dict[str, Any]:
        return {**self._fixed, "content": content, **_stop(end), "usage": _usage(usage)}


@dataclass
class _Block:
    """A block of the content."""

    # As it is before its first delta.
    start: dict[str, Any]
    parts: list[str] = field(default_factory=list)

    @property
    def type(self) -> str:
        return str(self.start["type"])

    def whole(self) -> dict[str, Any]:
        text = "".join(self.parts)
        match self.type:
            case "tool_use":
                return {**self.start, "input": _input(text)}
            case "thinking":
                return {**self.start, "thinking": text, "signature": self.start["signature"]}
            case _:
                return {**self.start, "text": text}


class _Blocks:
    """Builds blocks from pieces, with the events of a stream."""

    def __init__(self, request_id: str, call_ids: CallIds) -> None:
        self._request_id = request_id
        self._call_ids = call_ids
        # The last one may be open.
        self._blocks: list[_Block] = []
        self._is_open = False

    def add(self, pieces: Iterable[Piece]) -> Iterator[ServerEvent]:
        for piece in pieces:
            match piece:
                case Content(text):
                    yield from self._continue({"type": "text", "text": ""})
                    yield self._delta("text_delta", "text", text)
                case Reasoning(text):
                    yield from self._continue({"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta("thinking_delta", "thinking", text)
                case CallStart(index, name):
                    yield from self.close()
                    call_id = self._call_ids[index]
                    yield self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case Arguments(_, text):
                    yield self._delta("input_json_delta", "partial_json", text)
                case CallEnd():
                    yield from self.close()

    def replay(self, pieces: Iterable[Piece]) -> None:
        """Add pieces whose events nothing reads."""
        for _ in self.add(pieces):
            pass

    def close(self) -> Iterator[ServerEvent]:
        """The events of the end of the block that is open, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block, index = self._blocks[-1], len(self._blocks) - 1
        if block.type == "thinking":
            # Clients send a block back only with a signature. None is checked.
            block.start["signature"] = signature = f"{self._request_id}_{index}"
            delta = {"type": "signature_delta", "signature": signature}
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)

    def content(self) -> list[dict[str, Any]]:
        for _ in self.close():
            pass
        return [block.whole() for block in self._blocks]

    def _continue(self, start: dict[str, Any]) -> Iterator[ServerEvent]:
        """Open a block unless one of its type is open."""
        if not self._is_open or self._blocks[-1].type != start["type"]:
            yield from self.close()
            yield self._open(start)

    def _open(self, start: dict[str, Any]) -> ServerEvent:
        self._blocks.append(_Block(start))
        self._is_open = True
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=start)

    def _delta(self, kind: str, name: str, text: str) -> ServerEvent:
        self._blocks[-1].parts.append(text)
        delta = {"type": kind, name: text}
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)


def _event(name: str, **fields: Any) -> ServerEvent:
    return ServerEvent({"type": name, **fields}, name)


def _input(text: str) -> orjson.Fragment:
    """The arguments of a call, as JSON: orjson writes no integers of more than 64 bits. Of those
    that a limit has cut, what is there; of text that is no JSON object, which no grammar has held
    to one, nothing. Numbers beyond a double's range are null."""
    try:
        value = pydantic_core.from_json(text, allow_partial="trailing-strings")
    except ValueError:
        value = {}
    found = value if isinstance(value, dict) else {}
    return orjson.Fragment(pydantic_core.to_json(found, inf_nan_mode="null"))


def _stop(end: ChoiceEnd | None) -> dict[str, Any]:
    reason = None
    if end is not None:
        reason = "end_turn" if end.is_stop else "max_tokens"
        if end.is_stop and end.has_calls:
            reason = "tool_use"
        elif end.stop_string is not None:
            reason = "stop_sequence"
    stopped_by = end.stop_string if end is not None and reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stopped_by}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }
