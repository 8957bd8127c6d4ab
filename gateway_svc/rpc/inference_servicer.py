"""`InferenceService`: generation, resumption and cancellation."""

import grpc

from gateway_svc.generation import generation, submission, validation
from gateway_svc.generation.submission import PreparedRequest, RequestsInPreparation
from gateway_svc.generation.validation import GenerationRequest
from gateway_svc.metrics.request_metrics import GatewayMetrics
from gateway_svc.rpc import responses
from gateway_svc.rpc.call_interceptor import Context
from gateway_svc.scheduler.connection import SchedulerConnection
from gateway_svc.text.served_model import ServedModel
from quire.service.errors import failed
from quire.v1 import inference_pb2, inference_pb2_grpc


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self, served: ServedModel, scheduler: SchedulerConnection, metrics: GatewayMetrics
    ) -> None:
        self._served = served
        self._scheduler = scheduler
        self._metrics = metrics
        self._in_preparation = RequestsInPreparation()

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        with self._metrics.request() as times:
            prepared = await self._prepare(request, context)
            builder = responses.ResponseBuilder(prepared.model)
            async with generation.start(prepared, self._scheduler.requests) as running:
                async for update in times.measure(running.updates()):
                    builder.add(update)
        return builder.build(running)

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> None:
        # Written, not yielded, so that the call of a slow client can still end with a status.
        with self._metrics.request() as times:
            prepared = await self._prepare(request, context)
            async with generation.start(prepared, self._scheduler.requests) as running:
                async for update in times.measure(running.updates()):
                    response = responses.stream_response(
                        running, prepared.model, update, inference_pb2.StreamGenerateResponse
                    )
                    await context.write(response)

    async def ResumeGenerate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.ResumeGenerateRequest, context: Context
    ) -> None:
        validation.check_resume_request(request)
        with self._metrics.resumed_request() as times:
            model = self._served.get(None)
            async with generation.resume(
                request, self._served, self._scheduler.requests
            ) as running:
                async for update in times.measure(running.updates()):
                    response = responses.stream_response(
                        running, model, update, inference_pb2.ResumeGenerateResponse
                    )
                    await context.write(response)

    async def CancelGenerate(  # noqa: N802
        self, request: inference_pb2.CancelGenerateRequest, context: Context
    ) -> inference_pb2.CancelGenerateResponse:
        validation.check_request_id(request.request_id)
        # Both are checked: another request of this id may already run.
        was_in_preparation = self._in_preparation.cancel(request.request_id)
        was_live = await self._scheduler.requests.cancel(request.request_id)
        if not (was_in_preparation or was_live):
            raise failed(
                grpc.StatusCode.NOT_FOUND,
                "UNKNOWN_REQUEST",
                f"no request {request.request_id!r} is live",
            )
        return inference_pb2.CancelGenerateResponse()

    async def _prepare(self, request: GenerationRequest, context: Context) -> PreparedRequest:
        model = self._served.get(request.model if request.HasField("model") else None)
        with self._in_preparation.track(request.request_id):
            await self._scheduler.wait_until_connected()
            return await submission.prepare(
                request, model, self._scheduler.max_model_len, context.time_remaining()
            )
