"""The object `response` and the events of its stream."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
import orjson

from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.generation.generation import Generation
from gateway_svc.http.formats.format import Output, ServerEvent, Usage
from gateway_svc.http.formats.logprobs import chat_logprobs
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2
from quire.service.errors import RequestError

# Events before the first delta.
_NUM_FIRST = 4


class ResponseFormat:
    """Sequence numbers grow with the position in the output, so that they are the same for every
    reader: a delta's is that of the token behind it, plus the number of events before it."""

    def __init__(
        self,
        generation: Generation,
        model: Model,
        state: gateway_pb2.HttpState,
        after: int = -1,
    ) -> None:
        """The client has the events up to the sequence number `after`."""
        request_id = generation.request_id
        self._generation = generation
        self._model = model
        self._after = after
        self._item_id = f"msg_{request_id}"
        self._output = Output()
        self._fixed = _fixed_fields(request_id, state)

    def first_events(self, choices: Iterable[int]) -> Iterable[ServerEvent]:
        return self._new(self._first_events())

    def events(self, index: int, update: ChoiceUpdate, usage: Usage) -> Iterable[ServerEvent]:
        self._output.add(update)
        return self._new(self._events(update, usage))

    def last_events(self, usage: Usage) -> Iterable[ServerEvent]:
        return ()

    def body(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        [self._output] = outputs
        status = _status(self._output)
        is_running = self._output.end is None
        item = self._item(status, [self._whole_part()])
        return self._response(status, [item], None if is_running else usage)

    def queued(self) -> dict[str, Any]:
        """The object of a response that was accepted."""
        return self._response("queued", [], None)

    def cancelled(self) -> dict[str, Any]:
        """The object of a response that was cancelled."""
        return self._response("cancelled", [], None)

    def _new(self, events: Iterable[ServerEvent]) -> Iterator[ServerEvent]:
        return (event for event in events if event.data["sequence_number"] > self._after)

    def _first_events(self) -> Iterator[ServerEvent]:
        started = self._response("in_progress", [], None)
        part = self._part("", [])
        yield _event("response.created", 0, response=started)
        yield _event("response.in_progress", 1, response=started)
        item = self._item("in_progress", [])
        yield _event("response.output_item.added", 2, output_index=0, item=item)
        yield _event("response.content_part.added", 3, **self._place(), part=part)

    def _events(self, update: ChoiceUpdate, usage: Usage) -> Iterator[ServerEvent]:
        number = _NUM_FIRST + update.first_index + len(update.token_ids)
        if update.text or update.logprobs:
            yield _event(
                "response.output_text.delta",
                number - 1 if update.token_ids else number,
                **self._place(),
                delta=update.text,
                logprobs=chat_logprobs(update, self._model) or [],
            )
        if update.end is not None:
            yield from self._end_events(number + 1, usage)

    def _end_events(self, number: int, usage: Usage) -> Iterator[ServerEvent]:
        part = self._whole_part()
        text, logprobs = part["text"], part["logprobs"]
        place = self._place()
        status = _status(self._output)
        item = self._item(status, [part])
        yield _event("response.output_text.done", number, **place, text=text, logprobs=logprobs)
        yield _event("response.content_part.done", number + 1, **place, part=part)
        yield _event("response.output_item.done", number + 2, output_index=0, item=item)
        response = self._response(status, [item], usage)
        yield _event(f"response.{status}", number + 3, response=response)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        response = {**self._fixed, "status": status, "output": output, "usage": None}
        if usage is not None:
            response["usage"] = _usage(usage)
            response["completed_at"] = int(time.time())
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _whole_part(self) -> dict[str, Any]:
        logprobs = [
            entry
            for update in self._output.updates
            for entry in chat_logprobs(update, self._model) or ()
        ]
        [choice] = self._generation.choices
        return self._part(choice.received_text + self._output.text, logprobs)

    @staticmethod
    def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def ended_response(
    request_id: str, state: gateway_pb2.HttpState, error: RequestError
) -> dict[str, Any]:
    """The object of a response that was cancelled or has failed."""
    response = {**_fixed_fields(request_id, state), "output": [], "usage": None}
    if error.code is grpc.StatusCode.CANCELLED:
        return {**response, "status": "cancelled"}
    reported = {"code": "server_error", "message": error.message}
    return {**response, "status": "failed", "error": reported}


def _fixed_fields(request_id: str, state: gateway_pb2.HttpState) -> dict[str, Any]:
    return {
        "id": f"resp_{request_id}",
        "created_at": state.created,
        "error": None,
        "incomplete_details": None,
        **orjson.loads(state.response or b"{}"),
    }


def next_index_after(number: int) -> int:
    """The index of the token after the delta with this sequence number; 0 before the first."""
    return max(0, number + 1 - _NUM_FIRST)


def _status(output: Output) -> str:
    if output.end is None:
        return "in_progress"
    return "completed" if output.end.is_stop else "incomplete"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _event(name: str, number: int, **fields: Any) -> ServerEvent:
    return ServerEvent({"type": name, "sequence_number": number, **fields}, name)
