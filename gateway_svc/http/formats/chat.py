"""The objects `chat.completion` and `chat.completion.chunk`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.generation.choice_parser import ToolCallDelta
from gateway_svc.http.errors import HttpError
from gateway_svc.http.formats.chunks import Chunks
from gateway_svc.http.formats.format import Output, ServerEvent, Usage, finish_reason, stop_reason
from gateway_svc.http.formats.logprobs import chat_logprobs, prompt_logprobs
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2


class ChatFormat:
    def __init__(self, request_id: str, model: Model, state: gateway_pb2.HttpState) -> None:
        self._model = model
        self._state = state
        self._fixed = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": state.created,
            "model": model.name,
        }
        self._chunks = Chunks(self._fixed, state)

    def first_events(
        self, choices: Iterable[int], prompt_token_ids: list[int] | None
    ) -> Iterable[ServerEvent]:
        for index in choices:
            event = self._chunks.of(_choice(index, {"role": "assistant", "content": ""}))
            if prompt_token_ids is not None:
                event.data["prompt_token_ids"] = prompt_token_ids
            yield event

    def events(
        self, index: int, update: ChoiceUpdate, usage: Callable[[], Usage]
    ) -> Iterable[ServerEvent]:
        has_ids = self._state.return_token_ids and update.token_ids
        delta = _delta(update)
        if not (delta or update.logprobs or update.end or has_ids):
            # Text that is held back comes with a later update.
            return
        logprobs = chat_logprobs(update, self._model)
        choice = {
            **_choice(index, delta),
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish_reason(update.end),
        }
        if update.end is not None:
            choice["stop_reason"] = stop_reason(update.end, self._model, self._state)
        if self._state.return_token_ids:
            choice["token_ids"] = update.token_ids
        yield self._chunks.of_update(choice, usage)

    def last_events(self, usage: Usage) -> Iterable[ServerEvent]:
        yield from self._chunks.last(usage)

    def error_events(self, error: HttpError) -> Iterable[ServerEvent]:
        return ()

    def body(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(output),
                "logprobs": self._joined_logprobs(output),
                "finish_reason": finish_reason(output.end),
                "stop_reason": stop_reason(output.end, self._model, self._state),
                **({"token_ids": output.token_ids} if self._state.return_token_ids else {}),
            }
            for index, output in enumerate(outputs)
        ]
        return {
            **self._fixed,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage.to_json(),
            **(
                {}
                if outputs[0].prompt_token_ids is None
                else {"prompt_token_ids": outputs[0].prompt_token_ids}
            ),
            **(
                {}
                if outputs[0].prompt_logprobs is None
                else {"prompt_logprobs": prompt_logprobs(outputs[0].prompt_logprobs, self._model)}
            ),
        }

    def _joined_logprobs(self, output: Output) -> dict[str, Any] | None:
        if not any(update.logprobs for update in output.updates):
            return None
        content = [
            entry for update in output.updates for entry in chat_logprobs(update, self._model) or ()
        ]
        return {"content": content, "refusal": None}


def _delta(update: ChoiceUpdate) -> dict[str, Any]:
    delta: dict[str, Any] = _reasoning(update.reasoning)
    if update.text:
        delta["content"] = update.text
    if update.tool_calls:
        delta["tool_calls"] = [_call_delta(call) for call in update.tool_calls]
    return delta


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def _message(output: Output) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
    message.update(_reasoning(output.reasoning))
    if output.tool_calls:
        message["content"] = output.text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in output.tool_calls
        ]
    return message


def _reasoning(text: str) -> dict[str, Any]:
    """Under vLLM's name and its older one."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
