"""What has been written, in the API's messages."""

from collections.abc import Iterable
from typing import TypeVar

from gateway_svc.choice import Outcome, Written
from gateway_svc.detokenizer import TokenTexts
from gateway_svc.generation import Generation
from gateway_svc.logprobs import TokenLogprobs
from gateway_svc.served_model import Model
from quire.v1 import inference_pb2

R = TypeVar("R", inference_pb2.StreamGenerateResponse, inference_pb2.ResumeGenerateResponse)


def stream_response(
    running: Generation,
    model: Model,
    update: Iterable[Written],
    kind: type[R],
) -> R:
    return kind(
        request_id=running.request_id,
        model=model.name,
        deltas=[_delta(written, model.token_texts) for written in update],
        usage=_usage(running) if running.has_ended else None,
    )


class Answer:
    """The response to a unary call, while it is written: each part goes where it stays."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._response = inference_pb2.GenerateResponse(model=model.name)
        # By choice.
        self._texts: list[list[str]] = []

    def add(self, update: Iterable[Written]) -> None:
        for written in update:
            while written.index >= len(self._texts):
                self._response.choices.add(index=len(self._texts))
                self._texts.append([])
            self._texts[written.index].append(written.text)
            choice = self._response.choices[written.index]
            choice.token_ids.extend(written.token_ids)
            _fill_all_logprobs(choice, written, self._model.token_texts)
            if written.outcome is not None:
                _set_finish(choice, written.outcome)

    def complete(self, running: Generation) -> inference_pb2.GenerateResponse:
        """Of a request that has ended, all of whose updates were added."""
        response = self._response
        response.request_id = running.request_id
        for choice, texts in zip(response.choices, self._texts, strict=True):
            choice.text = "".join(texts)
        response.usage.CopyFrom(_usage(running))
        return response


def _delta(written: Written, texts: TokenTexts) -> inference_pb2.ChoiceDelta:
    delta = inference_pb2.ChoiceDelta(
        index=written.index,
        text=written.text,
        token_ids=written.token_ids,
        first_token_index=written.first_index,
    )
    _fill_all_logprobs(delta, written, texts)
    if written.outcome is not None:
        _set_finish(delta, written.outcome)
    return delta


def _fill_all_logprobs(
    message: inference_pb2.ChoiceDelta | inference_pb2.Choice, written: Written, texts: TokenTexts
) -> None:
    for told in written.logprobs:
        _fill_logprobs(message.logprobs.add(), told, texts)


def _fill_logprobs(
    message: inference_pb2.TokenLogprobs, told: TokenLogprobs, texts: TokenTexts
) -> None:
    """Where they are: to make each of up to 21 entries and copy it takes twice the time."""
    own, *top = told.entries()
    _fill_entry(message.sampled, own, texts)
    for one in top:
        _fill_entry(message.top.add(), one, texts)


def _fill_entry(
    entry: inference_pb2.TokenLogprob, told: tuple[int, float, int], texts: TokenTexts
) -> None:
    entry.token_id, entry.logprob, entry.rank = told
    entry.text = texts[entry.token_id]


def _set_finish(
    message: inference_pb2.ChoiceDelta | inference_pb2.Choice, outcome: Outcome
) -> None:
    message.finish_reason = (
        inference_pb2.FINISH_REASON_STOP if outcome.is_stop else inference_pb2.FINISH_REASON_LENGTH
    )
    if outcome.stop_string is not None:
        message.stop_string = outcome.stop_string
    elif outcome.stop_token_id is not None:
        message.stop_token_id = outcome.stop_token_id


def _usage(running: Generation) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=running.num_prompt_tokens,
        cached_prompt_tokens=running.num_cached_prompt_tokens,
        completion_tokens=running.num_tokens,
    )
