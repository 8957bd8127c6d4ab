"""The objects `text_completion`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.http.errors import HttpError
from gateway_svc.http.formats.chunks import Chunks
from gateway_svc.http.formats.format import Output, ServerEvent, Usage, finish_reason, stop_reason
from gateway_svc.http.formats.logprobs import completion_logprobs, prompt_logprobs
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2


class CompletionFormat:
    def __init__(self, request_id: str, model: Model, state: gateway_pb2.HttpState) -> None:
        self._model = model
        self._state = state
        self._fixed = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": state.created,
            "model": model.name,
        }
        self._chunks = Chunks(self._fixed, state)

    def first_events(
        self, choices: Iterable[int], prompt_token_ids: list[int] | None
    ) -> Iterable[ServerEvent]:
        for index in choices if prompt_token_ids is not None else ():
            ids = {"prompt_token_ids": prompt_token_ids, "token_ids": []}
            yield self._chunks.of({**_choice(index, ""), **ids})

    def events(
        self, index: int, update: ChoiceUpdate, usage: Callable[[], Usage]
    ) -> Iterable[ServerEvent]:
        has_ids = self._state.return_token_ids and update.token_ids
        if not (update.text or update.logprobs or update.end or has_ids):
            # Text that is held back comes with a later update.
            return
        choice = {
            **_choice(index, update.text),
            "logprobs": completion_logprobs(update, self._model),
            "finish_reason": finish_reason(update.end),
            "stop_reason": stop_reason(update.end, self._model, self._state),
        }
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
                **_choice(index, output.text),
                "logprobs": self._joined_logprobs(output),
                "finish_reason": finish_reason(output.end),
                "stop_reason": stop_reason(output.end, self._model, self._state),
                **self._token_ids(output),
                **self._prompt_logprobs(output),
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._fixed, "choices": choices, "usage": usage.to_json()}

    def _token_ids(self, output: Output) -> dict[str, Any]:
        if not self._state.return_token_ids:
            return {}
        return {"token_ids": output.token_ids, "prompt_token_ids": output.prompt_token_ids}

    def _prompt_logprobs(self, output: Output) -> dict[str, Any]:
        if output.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs, self._model)}

    def _joined_logprobs(self, output: Output) -> dict[str, Any] | None:
        parts = [completion_logprobs(update, self._model) for update in output.updates]
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return {name: [entry for part in found for entry in part[name]] for name in found[0]}


def _choice(index: int, text: str) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
