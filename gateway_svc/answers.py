"""What has been written, in the API's messages."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

from gateway_svc.choice import Choice, Outcome, Written
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
        deltas=deltas(model, update),
        usage=_usage(running) if running.has_ended else None,
    )


def response(
    running: Generation, model: Model, parts: Iterable[inference_pb2.ChoiceDelta]
) -> inference_pb2.GenerateResponse:
    """Of a request that has ended, from all its deltas."""
    by_choice: list[list[inference_pb2.ChoiceDelta]] = [[] for _ in running.choices]
    for part in parts:
        by_choice[part.index].append(part)
    return inference_pb2.GenerateResponse(
        request_id=running.request_id,
        model=model.name,
        choices=map(_choice, running.choices, by_choice),
        usage=_usage(running),
    )


def deltas(model: Model, update: Iterable[Written]) -> list[inference_pb2.ChoiceDelta]:
    return [_delta(written, model.token_texts) for written in update]


def _delta(written: Written, texts: TokenTexts) -> inference_pb2.ChoiceDelta:
    delta = inference_pb2.ChoiceDelta(
        index=written.index,
        text=written.text,
        token_ids=written.token_ids,
        first_token_index=written.first_index,
    )
    for told in written.logprobs:
        _fill_logprobs(delta.logprobs.add(), told, texts)
    if written.outcome is not None:
        _set_finish(delta, written.outcome)
    return delta


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


def _choice(choice: Choice, parts: Sequence[inference_pb2.ChoiceDelta]) -> inference_pb2.Choice:
    whole = inference_pb2.Choice(
        index=choice.index,
        text="".join(part.text for part in parts),
        token_ids=chain.from_iterable(part.token_ids for part in parts),
        logprobs=chain.from_iterable(part.logprobs for part in parts),
    )
    if choice.outcome is not None:
        _set_finish(whole, choice.outcome)
    return whole


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
