"""`BeamSearchService`: the most likely continuations of a prompt."""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway_svc.generation.beam_search import Search, generation_request
from gateway_svc.generation.error_fields import renamed_field
from gateway_svc.rpc import responses
from gateway_svc.rpc.call_interceptor import Context
from gateway_svc.rpc.generation_servicer import GenerationServicer
from quire.service.errors import RequestError
from quire.v1 import beam_search_pb2, beam_search_pb2_grpc


class BeamSearchServicer(GenerationServicer, beam_search_pb2_grpc.BeamSearchServiceServicer):
    async def BeamSearch(  # noqa: N802
        self, request: beam_search_pb2.BeamSearchRequest, context: Context
    ) -> beam_search_pb2.BeamSearchResponse:
        tenant = self._tenant_of(context)
        with self._metrics.request(tenant.tenant_class) as times:
            async with self._until_deadline(context), _with_params():
                prepared = await self._generations.prepare(
                    generation_request(request),
                    context.time_remaining(),
                    tenant,
                    search=Search.of(request.params),
                )
                texts: dict[int, list[str]] = defaultdict(list)
                async with self._generations.start(prepared) as running:
                    async for update in running.updates():
                        times.observe(update)
                        for part in update:
                            texts[part.index].append(part.text)
        has_ids = request.WhichOneof("prompt") == "token_ids"
        return responses.beam_search_response(
            running,
            prepared.model,
            ["".join(texts[index]) for index in range(len(running.choices))],
            () if has_ids else prepared.submission.prompt_token_ids,
        )


@asynccontextmanager
async def _with_params() -> AsyncIterator[None]:
    """Errors of sampling parameters name those of the search."""
    try:
        yield
    except RequestError as error:
        raise renamed_field(error, "sampling_params.", "params.") from error
