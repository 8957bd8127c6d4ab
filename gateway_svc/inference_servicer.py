"""`InferenceService`: generation and its cancellation."""

import grpc

from gateway_svc import generation, validation
from gateway_svc.choice import Outcome, Written
from gateway_svc.generation import Generation, Submitted
from gateway_svc.preparations import Preparations
from gateway_svc.rpc import Calls, Context
from gateway_svc.scheduler_link import SchedulerLink
from gateway_svc.served_model import ServedModel
from gateway_svc.validation import GenerationRequest
from quire.service.errors import failed
from quire.v1 import inference_pb2, inference_pb2_grpc


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, served: ServedModel, link: SchedulerLink, calls: Calls) -> None:
        self._served = served
        self._link = link
        self._calls = calls
        self._preparations = Preparations()

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with self._calls.answering(context):
            submitted = await self._prepare(request, context)
            async with generation.running(submitted, self._link.requests) as running:
                written = [update async for update in running.updates()]
            return inference_pb2.GenerateResponse(
                request_id=running.request_id,
                model=self._served.name,
                choices=[_choice(written, running.outcome)],
                usage=_usage(running),
            )
        raise AssertionError("answering ends the call")

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> None:
        # Written, not yielded: a slow reader's call can then still end with a status.
        async with self._calls.answering(context):
            submitted = await self._prepare(request, context)
            async with generation.running(submitted, self._link.requests) as running:
                async for update in running.updates():
                    await context.write(self._response(running, update))

    async def CancelGenerate(  # noqa: N802
        self, request: inference_pb2.CancelGenerateRequest, context: Context
    ) -> inference_pb2.CancelGenerateResponse:
        async with self._calls.answering(context):
            validation.check_request_id(request.request_id)
            # Both are asked: another request of this id may run already.
            here = self._preparations.cancel(request.request_id)
            there = await self._link.requests.cancel(request.request_id)
            if not (here or there):
                raise failed(
                    grpc.StatusCode.NOT_FOUND,
                    "UNKNOWN_REQUEST",
                    f"no request {request.request_id!r} is live",
                )
        return inference_pb2.CancelGenerateResponse()

    async def _prepare(self, request: GenerationRequest, context: Context) -> Submitted:
        model = self._served.named(request.model if request.HasField("model") else None)
        with self._preparations.of(request.request_id):
            return await generation.prepare(
                request, model, self._link.max_model_len, context.time_remaining()
            )

    def _response(
        self, running: Generation, written: Written
    ) -> inference_pb2.StreamGenerateResponse:
        response = inference_pb2.StreamGenerateResponse(
            request_id=running.request_id, model=self._served.name
        )
        if written.token_ids or running.outcome is not None:
            response.deltas.append(_delta(written, running.outcome))
        if running.outcome is not None:
            response.usage.CopyFrom(_usage(running))
        return response


def _delta(written: Written, outcome: Outcome | None) -> inference_pb2.ChoiceDelta:
    delta = inference_pb2.ChoiceDelta(
        text=written.text, token_ids=written.token_ids, first_token_index=written.first_index
    )
    if outcome is not None:
        _set_finish(delta, outcome)
    return delta


def _choice(written: list[Written], outcome: Outcome | None) -> inference_pb2.Choice:
    choice = inference_pb2.Choice(
        text="".join(part.text for part in written),
        token_ids=[id_ for part in written for id_ in part.token_ids],
    )
    if outcome is not None:
        _set_finish(choice, outcome)
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
    cached = 0 if running.outcome is None else running.outcome.num_cached_prompt_tokens
    return inference_pb2.Usage(
        prompt_tokens=running.num_prompt_tokens,
        cached_prompt_tokens=cached,
        completion_tokens=running.num_tokens,
    )
