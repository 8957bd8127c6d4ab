"""Converts choice updates to the API's messages."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeVar

from gateway_svc.generation.choice import ChoiceEnd, ChoiceUpdate
from gateway_svc.generation.generation import Generation
from gateway_svc.scheduler.events import TokenLogprobs
from gateway_svc.text.detokenizer import TokenTexts
from gateway_svc.text.served_model import Model
from quire.v1 import beam_search_pb2, inference_pb2

# Tokens of a prompt converted at a time: some milliseconds of work.
_CHUNK_TOKENS = 256

R = TypeVar("R", inference_pb2.StreamGenerateResponse, inference_pb2.ResumeGenerateResponse)
_ChoiceMessage = inference_pb2.ChoiceDelta | inference_pb2.Choice


async def stream_response(
    running: Generation, model: Model, update: Sequence[ChoiceUpdate], kind: type[R]
) -> R:
    response = kind(
        request_id=running.request_id,
        model=model.name,
        usage=_usage(running) if running.has_ended else None,
    )
    for part in update:
        _add_delta(response, part, model.token_texts)
    if running.prompt_logprobs is not None and any(
        part.index == part.first_index == 0 and part.token_ids for part in update
    ):
        await _fill_prompt_logprobs(response, running, model.token_texts)
    return response


class ResponseBuilder:
    """Builds the response of a unary call in place, update by update."""

    def __init__(self, model: Model, prompt_token_ids: Iterable[int]) -> None:
        """`prompt_token_ids` is empty if the client has them."""
        self._model = model
        self._response = inference_pb2.GenerateResponse(
            model=model.name, prompt_token_ids=prompt_token_ids
        )
        # By choice.
        self._texts: list[list[str]] = []
        self._reasoning: list[list[str]] = []

    def add(self, update: Iterable[ChoiceUpdate]) -> None:
        for part in update:
            while part.index >= len(self._texts):
                self._response.choices.add(index=len(self._texts))
                self._texts.append([])
                self._reasoning.append([])
            self._texts[part.index].append(part.text)
            self._reasoning[part.index].append(part.reasoning)
            choice = self._response.choices[part.index]
            _add_tool_calls(choice, part)
            choice.token_ids.extend(part.token_ids)
            _fill_all_logprobs(choice, part, self._model.token_texts)
            if part.end is not None:
                _set_finish(choice, part.end)

    async def build(self, running: Generation) -> inference_pb2.GenerateResponse:
        """Complete the response, after all updates of a request that has ended were added."""
        response = self._response
        response.request_id = running.request_id
        for choice, texts in zip(response.choices, self._texts, strict=True):
            choice.text = "".join(texts)
            choice.reasoning = "".join(self._reasoning[choice.index])
        response.usage.CopyFrom(_usage(running))
        await _fill_prompt_logprobs(response, running, self._model.token_texts)
        return response


def beam_search_response(
    running: Generation, model: Model, texts: Sequence[str], prompt_token_ids: Iterable[int]
) -> beam_search_pb2.BeamSearchResponse:
    """The response of a search that has ended. `prompt_token_ids` is empty if the client has
    them."""
    assert running.search is not None
    response = beam_search_pb2.BeamSearchResponse(
        request_id=running.request_id,
        model=model.name,
        usage=_usage(running),
        prompt_token_ids=prompt_token_ids,
    )
    for choice, text, found in zip(running.choices, texts, running.search.hypotheses, strict=True):
        is_stop = choice.end is not None and choice.end.is_stop
        response.sequences.add(
            text=text,
            token_ids=found.token_ids,
            finish_reason=(
                inference_pb2.FINISH_REASON_STOP if is_stop else inference_pb2.FINISH_REASON_LENGTH
            ),
            stop_token_id=found.token_ids[-1] if is_stop else None,
            cumulative_logprob=found.logprob,
            score=found.score,
        )
    return response


def _add_delta(response: R, update: ChoiceUpdate, texts: TokenTexts) -> None:
    """Built in place: creating and copying it takes longer."""
    delta = response.deltas.add(
        index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        first_token_index=update.first_index,
        reasoning=update.reasoning,
    )
    for call in update.tool_calls:
        delta.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    _fill_all_logprobs(delta, update, texts)
    if update.end is not None:
        _set_finish(delta, update.end)


def _add_tool_calls(choice: inference_pb2.Choice, update: ChoiceUpdate) -> None:
    for delta in update.tool_calls:
        if delta.id is not None:
            choice.tool_calls.add(id=delta.id, name=delta.name)
        choice.tool_calls[delta.index].arguments += delta.arguments


async def _fill_prompt_logprobs(
    message: inference_pb2.GenerateResponse | R, running: Generation, texts: TokenTexts
) -> None:
    """Fill them in, if they are wanted. A prompt may have a million of them, so this yields to the
    event loop after each chunk."""
    if running.prompt_logprobs is None:
        return
    message.prompt_logprobs.add()
    for at, logprobs in enumerate(running.prompt_logprobs[1:], 1):
        _fill_logprobs(message.prompt_logprobs.add(), logprobs, texts)
        if at % _CHUNK_TOKENS == 0:
            await asyncio.sleep(0)


def _fill_all_logprobs(message: _ChoiceMessage, update: ChoiceUpdate, texts: TokenTexts) -> None:
    for logprobs in update.logprobs:
        _fill_logprobs(message.logprobs.add(), logprobs, texts)


def _fill_logprobs(
    message: inference_pb2.TokenLogprobs, logprobs: TokenLogprobs, texts: TokenTexts
) -> None:
    """Fill up to 21 entries in place: creating and copying each takes twice the time."""
    (token_id, logprob, rank), *top = logprobs.entries()
    sampled = message.sampled
    sampled.token_id, sampled.logprob, sampled.rank = token_id, logprob, rank
    sampled.text = texts[token_id]
    add = message.top.add
    for token_id, logprob, rank in top:
        add(token_id=token_id, logprob=logprob, rank=rank, text=texts[token_id])


def _set_finish(message: _ChoiceMessage, end: ChoiceEnd) -> None:
    if not end.is_stop:
        message.finish_reason = inference_pb2.FINISH_REASON_LENGTH
    elif end.has_calls:
        message.finish_reason = inference_pb2.FINISH_REASON_TOOL_CALLS
    else:
        message.finish_reason = inference_pb2.FINISH_REASON_STOP
    if end.stop_string is not None:
        message.stop_string = end.stop_string
    elif end.stop_token_id is not None:
        message.stop_token_id = end.stop_token_id


def _usage(running: Generation) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=running.num_prompt_tokens,
        cached_prompt_tokens=running.num_cached_prompt_tokens,
        completion_tokens=running.num_tokens,
        reasoning_tokens=running.num_reasoning_tokens,
    )
