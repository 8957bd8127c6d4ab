"""`InferenceService`: generation, resumption and cancellation."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway_svc.generation.error_fields import without_field
from gateway_svc.rpc import responses
from gateway_svc.rpc.call_interceptor import Context
from gateway_svc.rpc.generation_servicer import GenerationServicer
from gateway_svc.scheduler.events import EndedError
from quire.v1 import inference_pb2, inference_pb2_grpc


class InferenceServicer(GenerationServicer, inference_pb2_grpc.InferenceServiceServicer):
    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        tenant = self._tenant_of(context)
        with self._metrics.request(tenant.tenant_class) as times:
            async with self._until_deadline(context):
                prepared = await self._generations.prepare(
                    request, context.time_remaining(), tenant
                )
                has_ids = request.WhichOneof("prompt") == "token_ids"
                builder = responses.ResponseBuilder(
                    prepared.model, () if has_ids else prepared.submission.prompt_token_ids
                )
                async with self._generations.start(prepared) as running:
                    async for update in running.updates():
                        times.observe(update)
                        builder.add(update)
        return await builder.build(running)

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> None:
        # Written, not yielded, so that the call of a slow client can still end with a status.
        tenant = self._tenant_of(context)
        with self._metrics.request(tenant.tenant_class) as times:
            async with self._until_deadline(context):
                prepared = await self._generations.prepare(
                    request, context.time_remaining(), tenant
                )
                async with self._generations.start(prepared) as running:
                    async for update in running.updates():
                        times.observe(update)
                        response = await responses.stream_response(
                            running, prepared.model, update, inference_pb2.StreamGenerateResponse
                        )
                        await context.write(response)

    async def ResumeGenerate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.ResumeGenerateRequest, context: Context
    ) -> None:
        tenant = self._tenant_of(context)
        with self._metrics.resumed_request(tenant.tenant_class) as times:
            async with self._until_deadline(context):
                model = self._generations.served.get(None)
                async with (
                    _without_field(),
                    self._generations.resume(request, tenant) as running,
                ):
                    async for update in running.updates():
                        times.observe(update)
                        response = await responses.stream_response(
                            running, model, update, inference_pb2.ResumeGenerateResponse
                        )
                        await context.write(response)

    async def CancelGenerate(  # noqa: N802
        self, request: inference_pb2.CancelGenerateRequest, context: Context
    ) -> inference_pb2.CancelGenerateResponse:
        await self._generations.cancel(request.request_id, self._tenant_of(context))
        return inference_pb2.CancelGenerateResponse()


@asynccontextmanager
async def _without_field() -> AsyncIterator[None]:
    """The error with which a resumed request ends may name a field that this call does not have."""
    try:
        yield
    except EndedError as error:
        raise without_field(error) from error
