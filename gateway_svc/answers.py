"""What has been written, in the API's messages."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from gateway_svc.choice import Outcome, Written
from gateway_svc.generation import Generation
from quire.v1 import inference_pb2

R = TypeVar("R", inference_pb2.StreamGenerateResponse, inference_pb2.ResumeGenerateResponse)


def stream_response(
    running: Generation,
    model: str,
    update: Iterable[Written],
    kind: type[R],
) -> R:
    return kind(
        request_id=running.request_id,
        model=model,
        deltas=map(_delta, update),
        usage=_usage(running) if running.has_ended else None,
    )


def response(
    running: Generation, model: str, updates: Iterable[Sequence[Written]]
) -> inference_pb2.GenerateResponse:
    """Of a request that has ended, from everything that was written."""
    parts: list[list[Written]] = [[] for _ in running.choices]
    for update in updates:
        for written in update:
            parts[written.index].append(written)
    return inference_pb2.GenerateResponse(
        request_id=running.request_id,
        model=model,
        choices=map(_choice, parts),
        usage=_usage(running),
    )


def _delta(written: Written) -> inference_pb2.ChoiceDelta:
    delta = inference_pb2.ChoiceDelta(
        index=written.index,
        text=written.text,
        token_ids=written.token_ids,
        first_token_index=written.first_index,
    )
    if written.outcome is not None:
        _set_finish(delta, written.outcome)
    return delta


def _choice(parts: Sequence[Written]) -> inference_pb2.Choice:
    last = parts[-1]
    choice = inference_pb2.Choice(
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=[id_ for part in parts for id_ in part.token_ids],
    )
    if last.outcome is not None:
        _set_finish(choice, last.outcome)
    return choice


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
