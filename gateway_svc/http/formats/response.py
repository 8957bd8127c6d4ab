"""The object `response` and the events of its stream."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import orjson

from gateway_svc.generation.choice import ChoiceEnd, ChoiceUpdate
from gateway_svc.generation.generation import Generation
from gateway_svc.generation.output_parsing import CallIds
from gateway_svc.http.errors import HttpError, format_names, to_http
from gateway_svc.http.formats.format import Output, ServerEvent, Usage
from gateway_svc.http.formats.response_items import ResponseItems, first_number, merged
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2
from quire.service.errors import RequestError

# The status of a request that was cancelled.
_CANCELLED = 499


class ResponseFormat:
    """Events are numbered by the position in the output, so that the numbers are the same for every
    reader."""

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
        self._after = after
        self._end: ChoiceEnd | None = None
        parsing = gateway_pb2.OutputParsing()
        if generation.state is not None:
            parsing = generation.state.parsing
        self._items = ResponseItems(request_id, model, CallIds(request_id, 0, parsing.tool_format))
        self._is_replayed = False
        self._fixed = _fixed_fields(request_id, state)

    def first_events(
        self, choices: Iterable[int], prompt_token_ids: list[int] | None
    ) -> Iterable[ServerEvent]:
        return self._new(self._first_events())

    def events(
        self, index: int, update: ChoiceUpdate, usage: Callable[[], Usage]
    ) -> Iterable[ServerEvent]:
        return merged(self._new(self._events(update, usage)))

    def last_events(self, usage: Usage) -> Iterable[ServerEvent]:
        return ()

    def error_events(self, error: HttpError) -> Iterable[ServerEvent]:
        """The end of a response that has failed, and an error in the form of this API, which also
        has the object of all others: OpenAI's client for Python raises it."""
        [choice] = self._generation.choices
        following = first_number(choice.num_tokens + 1)
        # Where the response may run on, it continues behind this number without a gap.
        number = max(self._after, following - 1)
        if error.has_ended:
            number = max(self._after + 1, following)
            body = _ended_object(self._fixed, error)
            yield _numbered(number, f"response.{body['status']}", response=body)
            number += 1
        inner = error.body["error"]
        fields = {name: inner[name] for name in ("code", "message", "param")}
        yield _numbered(number, "error", **fields, error=inner)

    def body(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        [output] = outputs
        for update in output.updates:
            self._items.add_all(update)
        if output.end is None:
            return self._response("in_progress", None)
        self._end = output.end
        [choice] = self._generation.choices
        for _ in self._items.end(choice.num_tokens, output.end.is_stop):
            pass
        return self._response(self._status, usage)

    def queued(self) -> dict[str, Any]:
        """The object of a response that was accepted."""
        return self._response("queued", None)

    def cancelled(self) -> dict[str, Any]:
        """The object of a response that was cancelled."""
        return self._response("cancelled", None)

    @property
    def _status(self) -> str:
        """Of a response that has ended."""
        return "completed" if self._end is not None and self._end.is_stop else "incomplete"

    def _new(self, events: Iterable[ServerEvent]) -> Iterator[ServerEvent]:
        return (event for event in events if event.data["sequence_number"] > self._after)

    def _first_events(self) -> Iterator[ServerEvent]:
        started = self._response("in_progress", None)
        for number, name in enumerate(("response.created", "response.in_progress")):
            yield _numbered(number, name, response=started)

    def _events(self, update: ChoiceUpdate, usage: Callable[[], Usage]) -> Iterator[ServerEvent]:
        [choice] = self._generation.choices
        if not self._is_replayed:
            self._items.replay(choice.received_pieces)
            self._is_replayed = True
        yield from self._items.add(update)
        if update.end is not None:
            self._end = update.end
            yield from self._items.end(choice.num_tokens, update.end.is_stop)
            response = self._response(self._status, usage())
            name = f"response.{self._status}"
            yield self._items.event(choice.num_tokens + 1, name, response=response)

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        output = copy.deepcopy(self._items.items)
        response = {**self._fixed, "status": status, "output": output, "usage": None}
        if usage is not None:
            response["usage"] = _usage(usage)
            response["completed_at"] = int(time.time())
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response


def ended_response(
    request_id: str, state: gateway_pb2.HttpState, error: RequestError
) -> dict[str, Any]:
    """The object of a response that was cancelled or has failed."""
    return _ended_object(_fixed_fields(request_id, state), to_http(error, format_names(error)))


def _ended_object(fixed: dict[str, Any], failure: HttpError) -> dict[str, Any]:
    response = {**fixed, "output": [], "usage": None}
    if failure.status == _CANCELLED:
        return {**response, "status": "cancelled"}
    # The one of OpenAI's codes that is for requests at fault.
    code = "server_error" if failure.status >= 500 else "invalid_prompt"
    reported = {"code": code, "message": failure.body["error"]["message"]}
    return {**response, "status": "failed", "error": reported}


def ended_events(body: dict[str, Any], after: int) -> list[ServerEvent]:
    """The events of a response that has ended with an error and whose output is not kept: its start
    and its end, as far as they are behind a sequence number."""
    started = {**body, "status": "in_progress", "error": None}
    names = ("response.created", "response.in_progress")
    first = [(at, name, started) for at, name in enumerate(names) if at > after]
    last = (max(1, after) + 1, f"response.{body['status']}", body)
    return [_numbered(number, name, response=response) for number, name, response in (*first, last)]


def _numbered(number: int, name: str, /, **fields: Any) -> ServerEvent:
    return ServerEvent({"type": name, "sequence_number": number, **fields}, name)


def _fixed_fields(request_id: str, state: gateway_pb2.HttpState) -> dict[str, Any]:
    return {
        "id": f"resp_{request_id}",
        "created_at": state.created,
        "error": None,
        "incomplete_details": None,
        **orjson.loads(state.response or b"{}"),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # OpenAI charges for writes that a request asks for; the prefix cache needs none.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
