"""`InferenceService`: generation and its cancellation."""

import grpc

from gateway_svc import answers, generation, submission, validation
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.preparations import Preparations
from gateway_svc.rpc import Calls, Context
from gateway_svc.scheduler_link import SchedulerLink
from gateway_svc.served_model import ServedModel
from gateway_svc.submission import Submitted
from gateway_svc.validation import GenerationRequest
from quire.service.errors import failed
from quire.v1 import inference_pb2, inference_pb2_grpc


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self, served: ServedModel, link: SchedulerLink, calls: Calls, metrics: GatewayMetrics
    ) -> None:
        self._served = served
        self._link = link
        self._calls = calls
        self._metrics = metrics
        self._preparations = Preparations()

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with self._calls.answering(context):
            with self._metrics.request() as times:
                submitted = await self._prepare(request, context)
                answer = answers.Answer(submitted.model)
                async with generation.running(submitted, self._link.requests) as running:
                    async for update in times.of(running.updates()):
                        answer.add(update)
            return answer.complete(running)
        raise AssertionError("answering ends the call")

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> None:
        # Written, not yielded: a slow reader's call can then still end with a status.
        async with self._calls.answering(context):
            with self._metrics.request() as times:
                submitted = await self._prepare(request, context)
                async with generation.running(submitted, self._link.requests) as running:
                    async for update in times.of(running.updates()):
                        response = answers.stream_response(
                            running,
                            submitted.model,
                            update,
                            inference_pb2.StreamGenerateResponse,
                        )
                        await context.write(response)

    async def ResumeGenerate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.ResumeGenerateRequest, context: Context
    ) -> None:
        async with self._calls.answering(context):
            validation.check_resumed(request)
            with self._metrics.resumed_request() as times:
                model = self._served.named(None)
                async with generation.resumed(
                    request.request_id,
                    request.next_token_indices,
                    self._served,
                    self._link.requests,
                ) as running:
                    async for update in times.of(running.updates()):
                        response = answers.stream_response(
                            running,
                            model,
                            update,
                            inference_pb2.ResumeGenerateResponse,
                        )
                        await context.write(response)

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
            await self._link.greeted()
            return await submission.prepare(
                request, model, self._link.max_model_len, context.time_remaining()
            )
