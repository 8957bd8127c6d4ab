"""Items of a response whose output is split: reasoning, messages and calls, and their events."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.generation.choice_parser import ParsedPiece
from gateway_svc.generation.output_parsing import CallIds
from gateway_svc.http.formats.format import ServerEvent
from gateway_svc.http.formats.logprobs import chat_logprobs
from gateway_svc.output_formats.pieces import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
)
from gateway_svc.text.served_model import Model

# Events before the first piece.
_NUM_FIRST = 2
# Sequence numbers per token: more than a token has events.
_STRIDE = 64
_DELTAS = (
    "response.output_text.delta",
    "response.reasoning_text.delta",
    "response.function_call_arguments.delta",
)


class ResponseItems:
    """Builds items from pieces. The number of an event follows from the token with which its piece
    became certain and the events of the same token, so that it is the same for every reader."""

    def __init__(self, request_id: str, model: Model, call_ids: CallIds) -> None:
        self._request_id = request_id
        self._model = model
        self._call_ids = call_ids
        # The last one may be open.
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._logprobs: list[dict[str, Any]] = []
        # Of tokens that are part of no piece yet.
        self._pending: list[dict[str, Any]] = []
        # The token of the last event, and the events of that token before it.
        self._last = (0, -1)

    def add(self, update: ChoiceUpdate) -> Iterator[ServerEvent]:
        """The events of an update, before those of its end."""
        logprobs = chat_logprobs(update, self._model) or []
        num_seen = update.first_index
        for parsed in update.pieces:
            num_new = parsed.num_tokens - num_seen
            self._pending += logprobs[:num_new]
            logprobs, num_seen = logprobs[num_new:], parsed.num_tokens
            yield from self._piece(parsed)
        self._pending += logprobs

    def add_all(self, update: ChoiceUpdate) -> None:
        """Add an update whose events nothing reads."""
        for _ in self.add(update):
            pass

    def replay(self, pieces: Iterable[ParsedPiece]) -> None:
        """Add what the client had already."""
        for parsed in pieces:
            for _ in self._piece(parsed):
                pass

    def end(self, num_tokens: int, is_complete: bool) -> Iterator[ServerEvent]:
        """The events of the end of the last item; there is one in any case."""
        if not self.items:
            yield from self._open(num_tokens + 1, self._message())
        if self._is_open:
            yield from self._close(num_tokens + 1, is_complete)

    def event(self, num_tokens: int, name: str, /, **fields: Any) -> ServerEvent:
        token, count = self._last
        self._last = (num_tokens, count + 1 if num_tokens == token else 0)
        number = first_number(num_tokens) + min(self._last[1], _STRIDE - 1)
        return ServerEvent({"type": name, "sequence_number": number, **fields}, name)

    def _piece(self, parsed: ParsedPiece) -> Iterator[ServerEvent]:
        num_tokens, piece = parsed.num_tokens, parsed.piece
        item = self._item_for(piece)
        if item is not None:
            if self._is_open:
                yield from self._close(num_tokens, True)
            yield from self._open(num_tokens, item)
        match piece:
            case Content(text):
                logprobs, self._pending = self._pending, []
                self._logprobs += logprobs
                self.items[-1]["content"][0]["text"] += text
                name = "response.output_text.delta"
                fields = {"content_index": 0, "delta": text, "logprobs": logprobs}
                yield self.event(num_tokens, name, **self._place(), **fields)
                return
            case Reasoning(text):
                self.items[-1]["content"][0]["text"] += text
                name = "response.reasoning_text.delta"
                yield self.event(num_tokens, name, **self._place(), content_index=0, delta=text)
            case Arguments(_, text):
                self.items[-1]["arguments"] += text
                name = "response.function_call_arguments.delta"
                yield self.event(num_tokens, name, **self._place(), delta=text)
            case CallEnd():
                yield from self._close(num_tokens, True)
        self._pending = []

    def _item_for(self, piece: Piece) -> dict[str, Any] | None:
        """The new item that a piece begins, or None."""
        kind = self.items[-1]["type"] if self._is_open else None
        match piece:
            case Content() if kind != "message":
                return self._message()
            case Reasoning() if kind != "reasoning":
                id_ = self._id("rs")
                part = {"type": "reasoning_text", "text": ""}
                return {"type": "reasoning", "id": id_, "summary": [], "content": [part]}
            case CallStart(index, name):
                call_id = self._call_ids[index]
                return {
                    "type": "function_call",
                    "id": f"fc_{self._request_id}_{index}",
                    "call_id": call_id,
                    "name": name,
                    "arguments": "",
                }
        return None

    def _message(self) -> dict[str, Any]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {
            "type": "message",
            "id": self._id("msg"),
            "role": "assistant",
            "content": [part],
        }

    def _id(self, prefix: str) -> str:
        """The first item of a kind has the id of the request."""
        number = sum(item["id"].startswith(prefix) for item in self.items)
        return f"{prefix}_{self._request_id}" + (f"_{number}" if number else "")

    def _open(self, num_tokens: int, item: dict[str, Any]) -> Iterator[ServerEvent]:
        item["status"] = "in_progress"
        self.items.append(item)
        self._is_open = True
        self._logprobs = []
        is_call = item["type"] == "function_call"
        added = dict(item) if is_call else {**item, "content": []}
        name = "response.output_item.added"
        yield self.event(
            num_tokens, name, output_index=len(self.items) - 1, item=copy.deepcopy(added)
        )
        if not is_call:
            place = {**self._place(), "content_index": 0, "part": dict(item["content"][0])}
            yield self.event(num_tokens, "response.content_part.added", **place)

    def _close(self, num_tokens: int, is_complete: bool) -> Iterator[ServerEvent]:
        item, place = self.items[-1], self._place()
        item["status"] = "completed" if is_complete else "incomplete"
        self._is_open = False
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            name = "response.function_call_arguments.done"
            yield self.event(num_tokens, name, **place, **fields)
        else:
            [part] = item["content"]
            fields = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                fields["logprobs"] = part["logprobs"] = self._logprobs
            name = f"response.{part['type']}.done"
            yield self.event(num_tokens, name, **place, **fields)
            name = "response.content_part.done"
            yield self.event(num_tokens, name, **place, content_index=0, part=dict(part))
        name = "response.output_item.done"
        yield self.event(
            num_tokens, name, output_index=place["output_index"], item=copy.deepcopy(item)
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def first_number(num_tokens: int) -> int:
    """The sequence number of the first event of a token."""
    return _NUM_FIRST + num_tokens * _STRIDE


def merged(events: Iterable[ServerEvent]) -> Iterator[ServerEvent]:
    """The same events, with successive deltas of one item as one, which has the last number."""
    held: ServerEvent | None = None
    for event in events:
        if held is not None and event.name in _DELTAS and _is_same_place(held, event):
            data = {**event.data, "delta": held.data["delta"] + event.data["delta"]}
            if "logprobs" in data:
                data["logprobs"] = held.data["logprobs"] + data["logprobs"]
            held = ServerEvent(data, event.name)
            continue
        if held is not None:
            yield held
        held = event
    if held is not None:
        yield held


def _is_same_place(one: ServerEvent, other: ServerEvent) -> bool:
    return one.name == other.name and one.data["item_id"] == other.data["item_id"]
